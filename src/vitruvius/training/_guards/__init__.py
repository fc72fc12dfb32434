"""What watches a run: losses that are not finite, collapse of robustness, signals to stop, means for the log."""
