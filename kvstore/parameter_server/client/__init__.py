"""Clients of the servers and of the scheduler."""
