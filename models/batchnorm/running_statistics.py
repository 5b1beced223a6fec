"""Averages of running statistics over replicas that have seen different samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gangline.kvstore.group.serialization import digest
from gangline.models.workers import Workers

Buffers = Mapping[str, Sequence[torch.Tensor]]
"""Each replica's value of every buffer, by state_dict name."""


def averaged(buffers: Buffers, samples_seen: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the average of each buffer that differs between replicas, weighted by samples seen.

    For integer buffers, such as num_batches_tracked, the value of the replica that has seen most samples is taken.
    """
    averages: dict[str, torch.Tensor] = {}
    if not any(samples_seen):
        return averages
    for name, values in buffers.items():
        if all(torch.equal(values[0], value) for value in values[1:]):
            continue
        if values[0].is_floating_point():
            parts = [value.double() * seen for value, seen in zip(values, samples_seen, strict=True) if seen]
            averages[name] = (torch.stack(parts).sum(0) / sum(samples_seen)).to(values[0].dtype)
        else:
            averages[name] = values[max(range(len(values)), key=samples_seen.__getitem__)]
    return averages


def averaged_over(
    workers: Workers, buffers: Buffers, samples_seen: Sequence[int], name: str = "average_statistics"
) -> dict[str, torch.Tensor]:
    """Return `averaged` over the replicas of all workers; only buffers that differ are sent. Collective.

    Workers without buffers, which have seen no samples, are left out.
    """
    own = {name: [digest(value) for value in values] for name, values in buffers.items()}
    received = workers.all_gather([list(samples_seen), own], name)
    present = [(counts, digests) for counts, digests in received if digests]
    seen = [count for counts, _ in present for count in counts]
    names = present[0][1] if any(seen) else ()
    differing = [one for one in names if len({value for _, digests in present for value in digests[one]}) > 1]
    if not differing:
        return {}
    gathered = workers.all_gather({one: list(buffers[one]) for one in differing if one in buffers}, name)
    parts = [part for part in gathered if part]
    return averaged({one: [value for part in parts for value in part[one]] for one in differing}, seen)
