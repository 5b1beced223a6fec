"""The store without servers: workers reduce by collectives and each one updates."""
