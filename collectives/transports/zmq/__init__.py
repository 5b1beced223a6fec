"""ZeroMQ between hosts: a socket for each peer, and messages over it."""
