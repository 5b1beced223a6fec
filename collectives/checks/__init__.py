"""Checks that a job can run on these machines: this host, links between hosts, GPUs; each in a child process."""
