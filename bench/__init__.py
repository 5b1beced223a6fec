"""Measurements of everything below, side by side with what a user would otherwise run."""
