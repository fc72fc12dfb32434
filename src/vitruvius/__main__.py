"""`python -m vitruvius`."""

import sys

from vitruvius.cli import main

sys.exit(main())
