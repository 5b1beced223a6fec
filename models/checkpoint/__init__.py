"""Checkpoints: writing and reading them atomically, and which of them are kept."""
