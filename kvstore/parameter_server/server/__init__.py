"""Server: stores shards of the weights, sums pushes in rounds, runs the optimizer and sends values."""
