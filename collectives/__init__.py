"""Collectives: move and reduce tensors between devices and processes."""
