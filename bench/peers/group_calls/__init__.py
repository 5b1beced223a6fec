"""Programs of one bench: a rank that connects, splits its group and waits in barriers."""
