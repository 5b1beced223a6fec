"""Batches of unequal size for the ranks of a torch.distributed job, with the gradient of one device."""
