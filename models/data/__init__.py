"""Data for training: batches, built-in datasets, sources, reading processes, checks; images/ reads image folders."""
