"""Faster training steps, with the same result: blocks compiled once, whole steps recorded as CUDA graphs."""
