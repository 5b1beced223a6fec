"""A scheduler that is killed and started again: rounds go on meanwhile, collectives pass after it, nothing is left."""

from __future__ import annotations

import hashlib
import os
import resource
import sys
from functools import cache
from unittest.mock import patch

import pytest
import torch

from gangline.kvstore.parameter_server.kept_state import KeptLog, KeptState
from tests import scripted_faults
from tests.kvstore.test_launch import launch

pytestmark = pytest.mark.timeout(110)

LOOP = """\
import hashlib, sys, torch, gangline
torch.set_num_threads(1)
with gangline.create(sys.argv[1]) as kv:
    keys, outs = [0, 1], [torch.zeros(10), torch.zeros(300_000)]
    kv.init(keys, outs)
    if sys.argv[1] == "dist_sync":
        kv.set_optimizer(("adam", {"learning_rate": 0.01}))
    kv.pull(keys, outs)
    for step in range(kv.first_step, 12):
        gradients = [torch.cos(out + kv.rank + step) for out in outs]
        if sys.argv[1] == "dist_async":
            gradients = [torch.full_like(out, 3.0**step) for out in outs]
        kv.pushpull(keys, gradients, outs)
        if sys.argv[1] == "dist_sync":
            kv.barrier()
    kv.barrier()
    kv.pull(keys, outs)
    print(hashlib.sha256(outs[0].numpy().tobytes() + outs[1].numpy().tobytes()).hexdigest())
"""


def run(script: str, store: str) -> tuple[int, set[str], list[str]]:
    """Run the loop; return exit code, the distinct results of the workers, and the lines of standard error."""
    restarts = ("--restart-processes", str(script.count("kill"))) if script else ()
    with (
        patch.dict(os.environ, scripted_faults.variables(script)),
        launch("-n", "2", "-s", "1", *restarts, "--", sys.executable, "-c", LOOP, store) as job,
    ):
        status, out, errors = job.end(100)
    return status, {line.partition("] ")[2] for line in out}, errors


@cache
def undisturbed(store: str) -> set[str]:
    """Return the result of a job in which nothing dies."""
    _, result, _ = run("", store)
    assert len(result) == 1
    return result


_MESSAGES = {"join": (1, 3), "met": (1, 2, 9, 20), "meet": (1, 4, 11, 20), "leave": (1, 2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "store"),
    [
        *((f"scheduler kill at {point} {number}", "dist_sync") for point in _MESSAGES for number in _MESSAGES[point]),
        ("scheduler kill at meet 9; scheduler.1 kill at met 4", "dist_sync"),
        ("scheduler kill at met 12; server 0 kill at update 14", "dist_sync"),
        ("scheduler kill at meet 15; worker 1 kill at push-sent 9", "dist_sync"),
        ("worker 1 kill at push-sent 5; scheduler kill at join 4", "dist_sync"),
        ("server 0 kill at update 9; server 0.1 kill at close 6", "dist_sync"),
        ("scheduler kill at meet 5", "dist_async"),
        ("scheduler kill at leave 1", "dist_async"),
    ],
)
def test_processes_that_are_killed_and_started_again_change_no_bit(script: str, store: str) -> None:
    status, found, errors = run(script, store)
    assert status == 0, errors
    assert found == undisturbed(store)
    assert sum("it starts again" in line for line in errors) == script.count("kill"), errors


EXCHANGE = """\
import hashlib, os, signal, gangline
with gangline.create("dist_sync") as kv:
    kv.barrier()
    found = kv.exchange(os.environb[b"RANK"] * 4_000_000)
    kv.barrier()
    if kv.rank == 1 and "GANGLINE_INCARNATION" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    kv.barrier()
    print(*[hashlib.sha256(one).hexdigest() for one in found], kv.exchange(b"%d" % kv.rank))
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", ["meet", "met"])
@pytest.mark.parametrize("number", range(2, 8))
def test_a_worker_gets_what_was_exchanged_from_a_scheduler_that_was_killed_at_any_message(
    point: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted_faults.script_processes(monkeypatch, f"scheduler kill at {point} {number}")
    with launch("-n", "2", "-s", "1", "--restart-processes", "2", "--", sys.executable, "-c", EXCHANGE) as job:
        status, out, errors = job.end(100)
    assert status == 0, errors
    hashes = [hashlib.sha256(rank * 4_000_000).hexdigest() for rank in (b"0", b"1")]
    assert sorted(out) == [f"[worker {rank}] {' '.join(hashes)} [b'0', b'1']" for rank in (0, 1)]
    assert sum("it starts again" in line for line in errors) == 2, errors


@pytest.mark.slow
def test_a_scheduler_that_dies_too_often_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_faults.script_processes(monkeypatch, "scheduler kill at meet 5; scheduler.1 kill at meet 5")
    words = ("-n", "2", "-s", "1", "--restart-processes", "1", "--", sys.executable, "-c", LOOP, "dist_sync")
    with launch(*words) as job:
        status, _, errors = job.end(100)
    assert status == 137
    assert any("scheduler" in line and "was killed by SIGKILL; stopping" in line for line in errors)


def test_the_newest_content_is_read_again_whatever_its_length() -> None:
    memory = os.memfd_create("test")
    kept = KeptState(memory)
    assert kept.read() is None
    for length in (10, 100_000, 3, 0, 7_000, 5_000, 100_000, 1):
        content = bytes([length % 251]) * length
        kept.write(content)
        assert KeptState(os.dup(memory)).read() == content
    assert os.fstat(memory).st_size < 500_000


def test_tensors_are_read_again_without_the_memory_that_they_are_views_of() -> None:
    memory = os.memfd_create("test")
    large = torch.arange(1_000_000.0)
    content = [large[3:6], large[:6].view(2, 3).T, torch.tensor(True), torch.empty(0, 2), {"step": 3}]
    KeptState(memory).write(content)
    *tensors, rest = KeptState(memory).read()
    assert [one.tolist() for one in tensors] == [one.tolist() for one in content[:-1]]
    assert rest == {"step": 3}
    assert os.fstat(memory).st_size < 10_000


def test_an_interrupted_write_leaves_the_content_before_it() -> None:
    memory = os.memfd_create("test")
    kept = KeptState(memory)
    kept.write(b"first")
    whole = os.pread(memory, 1 << 20, 0)
    kept.write(b"second, longer")
    after = os.pread(memory, 1 << 20, 0)
    for cut in range(8, len(after)):  # all but the version, which is written last
        os.ftruncate(memory, 0)
        os.pwrite(memory, whole[:8] + after[8:cut] + whole[cut:], 0)
        assert KeptState(memory).read() == b"first"


def test_a_damaged_content_is_an_error() -> None:
    memory = os.memfd_create("test")
    KeptState(memory).write(b"content")
    for at in range(4096, os.fstat(memory).st_size):
        former = os.pread(memory, 1, at)
        os.pwrite(memory, bytes([former[0] ^ 1]), at)
        with pytest.raises(OSError, match="has a damaged entry at byte"):
            KeptState(memory).read()
        os.pwrite(memory, former, at)
    assert KeptState(memory).read() == b"content"


def test_a_log_that_ends_at_any_byte_of_its_last_entry_loses_that_entry_or_says_so() -> None:
    memory = os.memfd_create("test")
    log = KeptLog(memory)
    log.append(b"first")
    head, begin = os.pread(memory, 4096, 0), os.fstat(memory).st_size
    log.append(b"the last one")
    committed, content = os.pread(memory, 4096, 0), os.pread(memory, 1 << 20, 0)
    for cut in range(begin, len(content)):
        os.ftruncate(memory, cut)
        os.pwrite(memory, head, 0)  # the process was killed before the entry counted
        torn = KeptLog(memory)
        assert torn.read() == [b"first"]
        torn.append(b"x")
        assert KeptLog(memory).read() == [b"first", b"x"]
        os.pwrite(memory, content, 0)
        os.ftruncate(memory, cut)
        os.pwrite(memory, committed, 0)  # others may know of it
        with pytest.raises(OSError, match="has a damaged entry at byte"):
            KeptLog(memory).read()


def test_an_entry_for_which_there_is_no_memory_leaves_those_before_it() -> None:
    memory = os.memfd_create("test")
    log = KeptLog(memory)
    log.append(b"first")
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE), os.fstat(memory).st_size + 60
    for change in (log.append, lambda entry: log.replace([entry])):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                change(b"x" * 100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert KeptLog(memory).read() == [b"first"]
    log.append(b"second")
    assert KeptLog(memory).read() == [b"first", b"second"]


def test_a_log_that_is_replaced_and_trimmed_needs_memory_for_its_entries_alone() -> None:
    memory = os.memfd_create("test")
    log = KeptLog(memory)
    for length in (1 << 20, 2 << 20, 1 << 19, 3 << 20, 100, 1 << 20):
        log.replace([bytes([length % 251]) * length, b"second"])
        log.append(b"third")
        log.trim()
        assert KeptLog(memory).read() == [bytes([length % 251]) * length, b"second", b"third"]
        assert os.fstat(memory).st_blocks * 512 < length + 5 * 4096
