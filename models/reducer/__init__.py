"""Gradients in flat buckets that leave for the store during backward."""
