"""Module and its parts: replicas, training loop, data, metrics, checkpoints, reports and a zoo of networks."""
