"""Batch normalisation over several replicas: joint statistics and running averages."""
