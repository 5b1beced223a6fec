"""What bounds a training job, read from its timeline, and how many devices pay."""
