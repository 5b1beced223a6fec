"""Rank memory: the number of samples that fit into the memory of this rank's GPU."""

from __future__ import annotations

import torch

_USED = 0.9  # part of the free memory that growing shares may take; the rest is for fragmentation


def samples_that_fit(device: torch.device, samples: int) -> int | None:
    """Return the largest share that the peak of real training steps predicts to fit, between two steps.

    What is allocated between steps, such as weights and optimizer state, does not grow with the share; what a step adds
    is taken to grow in proportion, although a part of it does not.

    Args:
        device: device of the model.
        samples: the largest share that this rank has trained.

    Returns:
        A number of samples, ``samples`` or more; None: no limit is known, as on CPUs.
    """
    if device.type != "cuda" or not samples:
        return None
    peak, fixed = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    room = free + torch.cuda.memory_reserved(device) - peak
    return samples + max(0, int(_USED * room * samples / max(peak - fixed, 1)))
