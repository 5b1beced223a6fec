"""Start the processes of a job on this machine, relay their output, and leave none of them behind."""
