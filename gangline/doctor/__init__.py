"""`gangline check`: proofs that a job can run on this host, between hosts and on GPUs, each in a child process."""
