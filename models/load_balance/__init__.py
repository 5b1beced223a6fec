"""Splitting batches by measured speed and memory."""
