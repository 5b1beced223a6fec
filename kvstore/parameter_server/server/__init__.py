"""A server: messages, rounds, shards of the weights and their optimizer."""
