"""Batches of unequal size for workers and ranks: speed model, loads by measured speed and memory, exact gradients."""
