"""The run folder: its files, the state a run resumes from, and when each is written."""
