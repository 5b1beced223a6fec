"""Status of the jobs of a host for people and for Prometheus: who is late, and metrics."""
