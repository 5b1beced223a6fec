"""Programs of one bench: a worker that trains on random images."""
