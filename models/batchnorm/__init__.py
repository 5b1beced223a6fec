"""Batch normalization over replicas, workers and ranks: joint statistics, and averages of running statistics."""
