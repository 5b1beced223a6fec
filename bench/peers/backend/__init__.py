"""Programs of one bench: a rank of torch.distributed, or of an MPI."""
