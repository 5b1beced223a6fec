"""Programs of two benches: a rank that runs collectives, or connects, splits its group and waits in barriers."""
