"""Bytes between workers and servers: ZeroMQ, Unix streams and shared memory."""
