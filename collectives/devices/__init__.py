"""Collectives between the devices of one process, NCCL between processes, and the links between GPUs."""
