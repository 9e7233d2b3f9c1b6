"""Quantised checkpoints: a reader for each format, which turns its tensors into the one layout that is loaded."""
