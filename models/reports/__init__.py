"""Pictures of a run while it trains: a page of its own, and what TensorBoard shows."""
