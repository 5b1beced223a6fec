"""The `allreduce` store: no servers; workers reduce by collectives, and each updates its own copy of the weights."""
