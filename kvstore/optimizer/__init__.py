"""Optimizers of stores: plain-data specifications, the torch.optim that runs them key by key, clipping, state files."""
