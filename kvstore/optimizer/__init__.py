"""Optimizers as plain data, run key by key by torch.optim wherever the weights live."""
