"""Reducer: gradients leave for the store in buckets during backward, and updated weights return."""
