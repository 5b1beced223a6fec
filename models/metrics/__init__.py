"""Metrics by MXNet's names, computed by torchmetrics and combined over all workers."""
