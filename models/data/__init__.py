"""Data for training: batches, sources, readers, checks, image folders."""
