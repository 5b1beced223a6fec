"""Workloads of the benches: networks, images, contexts, sizes, shapes of collectives, and shared options."""
