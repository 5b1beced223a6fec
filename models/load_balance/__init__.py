"""Splitting batches over contexts and workers by their measured speed and memory (loads "auto")."""
