"""ZeroMQ sockets: one per pair of ranks, and the transport over them."""
