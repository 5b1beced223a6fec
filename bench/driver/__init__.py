"""The driver of a bench: it starts groups of processes, asks them to run, and measures candidates in turn."""
