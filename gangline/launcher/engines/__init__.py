"""Engines that start a job's processes: ssh, MPI, Slurm and Kubernetes."""
