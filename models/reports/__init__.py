"""Report of a run while it trains: an HTML progress page."""
