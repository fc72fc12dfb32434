"""Experiments over many runs: a question, a table, a figure; one file each."""

from vitruvius.studies._base import Subject, split_words, studies, study

__all__ = ["Subject", "split_words", "studies", "study"]
