"""Checkpoints: atomic writing and reading, and retention."""
