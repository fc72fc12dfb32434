"""Write what `vitruvius list` reads without importing anything: `python scripts/listing_index.py`."""

from __future__ import annotations

from vitruvius.listing import INDEX, write_index

if __name__ == "__main__":
    INDEX.write_text(write_index(), encoding="utf-8")
