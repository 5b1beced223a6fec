"""Unequal ranks: batches of a torch.distributed job split over its ranks by speed and memory."""
