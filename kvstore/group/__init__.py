"""Collectives of all workers on plain data, and the errors that workers report to each other."""
