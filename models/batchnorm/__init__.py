"""Batch normalization over several replicas: synchronized statistics within a process, averaged running statistics."""
