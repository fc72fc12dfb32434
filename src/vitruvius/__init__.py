"""Strength, use and beauty for vision transformers."""

__version__ = "0.1.0"
