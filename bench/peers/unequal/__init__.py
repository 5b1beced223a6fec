"""Programs of one bench: a rank that trains alone, under DistributedDataParallel, or with a balanced loader."""
