"""The job of `gangline bench faults`: a scheduler, a server and two workers, which train and note when they go on."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from gangline.kvstore.parameter_server.server import server
from gangline.kvstore.parameter_server.store import DistStore
from tests import scripted_faults
from tests.collectives.processes import Bare
from tests.hosts import enter
from tests.kvstore.parameter_server.digits import digits_of
from tests.kvstore.parameter_server.processes import join_job

ROLES = ("scheduler", "server 0", "worker 0", "worker 1")
STEPS = 6
_NUMEL = 50_000


class Told(NamedTuple):
    """Message of a process at its end."""

    error: str
    """Class and text of the error that ended it; "" if it has done its work."""
    times: Sequence[float]
    """`time.monotonic` seconds at the end of each step and of the process."""
    digits: str = ""
    """Base-4 digits of the sum: 1 for each push that counted once."""
    weights: str = ""
    """Digest of the trained weights."""


def play(
    place: Bare,
    hosts: Sequence[str],
    addresses: Sequence[str],
    variables: Mapping[str, str],
    states: Mapping[int, str],
) -> Told:
    """Run the role of a rank.

    Args:
        place: of this process.
        hosts: network namespace of each role; empty: this one.
        addresses: IP address of each role.
        variables: environment of the job.
        states: file in which worker 0 saves the optimizer's state, by step.
    """
    logging.getLogger("gangline").setLevel(logging.CRITICAL)
    os.environ.update(variables)
    scripted_faults.install()
    tempfile.tempdir = None
    if hosts:
        enter(hosts[place.rank])
    os.environ["GANGLINE_TEST_SCHEDULER"] = addresses[0]
    own = join_job(place, 2, 1)
    times: list[float] = []
    told = Told("", times)
    try:
        if own is not None:
            own.run()
        elif place.rank == 1:
            os.environ["DMLC_ROLE"] = "server"
            server.main()
        else:
            os.environ.update(DMLC_ROLE="worker", DMLC_WORKER_ID=str(place.rank - 2))
            told = _train(times, states)
    except Exception as error:  # noqa: BLE001  the table shows it
        told = Told(f"{type(error).__name__}: {error}", times)
    times.append(time.monotonic())
    return told


def _train(times: list[float], states: Mapping[int, str]) -> Told:
    """Push a base-4 digit and a gradient in each step; return the digits of the sums and the digest of the weights."""
    with DistStore("dist_sync") as kv:
        kv.init("digits", torch.zeros(4, dtype=torch.float64))
        kv.init("weights", torch.linspace(-1, 1, _NUMEL))
        kv.set_optimizer(("sgd", {"learning_rate": 1.0}))
        times.append(time.monotonic())
        weights, digits = torch.empty(_NUMEL), torch.empty(4, dtype=torch.float64)
        kv.pull("weights", weights)
        for step in range(STEPS):
            kv.push("digits", torch.full((4,), -(4.0 ** (kv.rank + 2 * step)), dtype=torch.float64))
            kv.push("weights", torch.sin(weights * (kv.rank + 3)) / 16)
            kv.pull("weights", weights)
            kv.pull("digits", digits)
            if step in states and kv.rank == 0:
                kv.save_optimizer_states(states[step])
            times.append(time.monotonic())
        kv.barrier()
        kv.pull("digits", digits)
        kv.pull("weights", weights)
        found = "".join(map(str, digits_of(digits[0].item())))
        return Told("", times, found, hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12])
