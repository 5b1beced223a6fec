"""Every call of every store, in cells of a table of axes, against a plain dictionary: see `store_grid`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence

import pytest

from gangline import Communicator, kvstore, spawn
from tests.kvstore.parameter_server.processes import run_job
from tests.kvstore.store_grid import Cell, Job, cells
from tests.kvstore.store_walk import groups, walk_group

pytestmark = pytest.mark.timeout(300)


def walk(job: Job, folder: str, wanted: Sequence[Sequence[Cell]], comm: Communicator | None = None) -> str:
    """Walk groups of cells, each on a store of its own where a process may have several; return what is wrong."""
    if job.is_dist:
        with kvstore.create(job.store) as kv:
            return next(filter(None, (walk_group(kv, job, group, folder) for group in wanted)), "")
    options = {} if comm is None else {"communicator": comm}
    for group in wanted:
        with kvstore.create(job.store, **options) as kv:
            if problem := walk_group(kv, job, group, folder):
                return problem
    return ""


def walk_in(comm: Communicator, job: Job, folder: str, wanted: Sequence[Sequence[Cell]]) -> str:
    return walk(job, folder, wanted, comm)


def check(job: Job, chosen: Iterable[Cell]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for wanted in groups(chosen, job):
            if job.is_alone:
                problems = [walk(job, folder, wanted)]
            elif job.is_dist:
                problems = run_job(walk, job.workers, job.servers, job, folder, wanted)
            else:
                problems = spawn(walk_in, job.workers, job, folder, wanted, threads=1)
            assert not any(problems), problems[0]


ALONE = [
    ("local", 2),
    ("device", 2),
    *(pytest.param(store, 3, marks=pytest.mark.slow) for store in ("local", "device")),
    *(pytest.param(f"local_allreduce_{place}", 2, marks=pytest.mark.slow) for place in ("cpu", "device")),
]


@pytest.mark.parametrize(("store", "strength"), ALONE)
def test_one_process(store: str, strength: int) -> None:
    check(Job(store), cells(strength))


def test_values_that_replace_others() -> None:
    """Walk rows, and values of other keys as outputs, where each push replaces the stored value."""
    aliases = {"call": "pushpull", "out": "another value", "compression": "none"}
    changes = (aliases, {"value": "rows"})
    check(Job("local"), (cell | {"update": "none"} | changes[cell["number"] % 2] for cell in cells(2)))


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_collectives(workers: int) -> None:
    check(Job("allreduce", workers), cells(2))


FURTHER = (
    ("dist_device_async", 2, 1),
    ("dist", 1, 1),
    ("dist_device_sync", 2, 1),
    ("dist_sync_device", 2, 2),
    ("dist_device", 1, 2),
    ("dist_async", 3, 2),
)
SERVERS = [
    ("dist_sync", 3, 2),
    *(pytest.param(*job, marks=pytest.mark.slow) for job in FURTHER),
]


@pytest.mark.parametrize(("store", "workers", "servers"), SERVERS)
def test_servers(store: str, workers: int, servers: int) -> None:
    check(Job(store, workers, servers), cells(2))


def test_a_part_of_the_cells_on_servers_without_rounds() -> None:
    check(Job("dist_device_async", 2, 1), [*cells(2)][::3])
