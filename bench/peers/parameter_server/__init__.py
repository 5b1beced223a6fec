"""Programs of one bench: a worker that pushes and pulls one key."""
