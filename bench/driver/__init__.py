"""The driver of a bench: starts groups of processes, and measures candidates in turn."""
