"""Programs of one bench: a rank of a collective."""
