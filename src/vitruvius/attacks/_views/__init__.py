"""Faster views of a model for the search alone; what they find is always verified on the model itself."""
