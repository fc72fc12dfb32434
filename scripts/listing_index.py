"""Write what `vitruvius list` reads without importing anything: `python scripts/listing_index.py`."""

from __future__ import annotations

import importlib.util
import sys

from vitruvius.listing import INDEX, write_index

if __name__ == "__main__":
    if importlib.util.find_spec("transformers") is None:
        sys.exit(
            "transformers is not installed, so its models would be missing in the index: pip install -e '.[hf]' first."
        )
    INDEX.write_text(write_index(), encoding="utf-8")
