"""Checkpoints: writing, reading, and which ones are kept."""
