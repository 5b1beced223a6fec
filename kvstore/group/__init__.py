"""Calls that all workers of a job make together on plain data, and the errors that they report to each other."""
