"""Advice on a training job: what bounds it, read from its timeline, and how many devices pay."""
