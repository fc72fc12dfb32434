"""Searches that several attacks share: Auto-PGD, the fast adaptive boundary search, Square's proposals, batching."""
