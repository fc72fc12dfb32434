"""`python -m vitruvius`."""

from vitruvius.cli import run_and_exit

run_and_exit()
