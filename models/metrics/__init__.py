"""Metrics by name, computed by torchmetrics, over all workers."""
