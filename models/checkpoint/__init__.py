"""Checkpoints: atomic writing and reading, retention, and the lock of a prefix."""
