"""Reports of a run while it trains: an HTML progress page and TensorBoard scalars."""
