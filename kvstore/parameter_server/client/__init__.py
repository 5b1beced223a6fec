"""What a worker uses to reach servers and the scheduler."""
