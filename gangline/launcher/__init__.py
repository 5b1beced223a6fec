"""Start the processes of a job on this machine, relay their output, and clean them all up."""
