"""Shared memory between ranks of one host: segments, slots, futex wake-up, cross-memory attach."""
