"""Ways for bytes from rank to rank: one file a medium, all with the interface of base.py."""
