"""Batches of unequal size for contexts, workers and ranks: loads by measured speed and memory, exact gradients."""
