"""Rules: which pairs of query and key an average map lets go; one file each, known by name."""

from vitruvius.compression.rules._base import Rule, rules

__all__ = ["Rule", "rules"]
