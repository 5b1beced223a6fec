"""Parameter server: the dist_* stores of workers, servers that hold shards of the keys, and the job's scheduler."""
