"""Collectives between the devices of one process, NCCL between processes, and links between GPUs."""
