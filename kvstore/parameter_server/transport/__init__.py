"""Transport between workers and servers: ZeroMQ sockets, Unix streams and shared memory."""
