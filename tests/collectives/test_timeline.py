"""The timeline: spans of all processes of a job in one file, nested, on one clock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from gangline.advise.steps import read_events
from gangline.collectives.timeline import recorder
from tests.programs import python

pytestmark = pytest.mark.timeout(90)

TRAIN = ("-m", "gangline", "train", "--network", "mlp", "--dataset", "digits", "--cpus", "1", "--num-epochs", "1")
RANK = """
import gangline, os, sys, torch
from gangline.collectives.timeline import recorder
torch.set_num_threads(1)
comm = gangline.connect()
for _ in range(5):
    comm.all_reduce(torch.ones(10))
comm.barrier()
comm.close()
"""
WORKER = """
import gangline, os, time, torch
with gangline.create("dist_sync") as kv:
    kv.init("w", torch.zeros(4))
    for _ in range(4):
        kv.pushpull("w", torch.ones(4), torch.zeros(4))
    time.sleep(float(os.environ.get("REST", 0)))
    if kv.rank == 0 and "END" in os.environ:
        os.kill(os.getpid(), 9)
"""


def launch(path: Path, *arguments: str, servers: int = 0, **variables: object) -> subprocess.CompletedProcess[str]:
    command = ("-m", "gangline", "launch", "-n", "2", "-s", servers, "--timeline", path)
    return python(*command, "--", sys.executable, *arguments, GANGLINE_TIMELINE=path, **variables)


class Trace:
    """Events of a trace file."""

    def __init__(self, path: Path) -> None:
        self.events: list[dict[str, Any]] = json.loads(path.read_text())
        self.names = {e["pid"]: e["args"]["name"] for e in self.events if e["name"] == "gangline_process"}
        self.clocks = {e["args"]["name"]: e["args"] for e in self.events if e["name"] == "gangline_process"}

    def spans(self, process: str, name: str) -> list[dict[str, Any]]:
        chosen = [e for e in self.events if e["ph"] in "Xb" and e["name"].startswith(name)]
        return [e for e in chosen if self.names[e["pid"]] == process]

    def check_nesting(self) -> None:
        """Check that spans of one thread are nested or disjoint, and that each overlapping span ends once."""
        threads = defaultdict(list)
        for event in self.events:
            if event["ph"] == "X":
                threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        for spans in threads.values():
            opened: list[float] = []
            for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
                while opened and opened[-1] <= begin:
                    opened.pop()
                assert not opened or end <= opened[-1] + 0.01
                opened.append(end)
        # Perfetto shows them among the tracks of their process only if their numbers are local to it.
        pairs = {ph: [(e["pid"], e["id2"]["local"]) for e in self.events if e["ph"] == ph] for ph in "be"}
        assert sorted(pairs["b"]) == sorted(pairs["e"])
        assert len(set(pairs["e"])) == len(pairs["e"])


@pytest.mark.slow
def test_workers_and_server_of_a_training_job_are_in_one_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = launch(path, *TRAIN, "--batch-size", "256", "--kv-store", "dist_sync", servers=1)
    assert done.returncode == 0, done.stderr
    trace = Trace(path)
    trace.check_nesting()
    assert set(trace.clocks) == {"worker 0", "worker 1", "server 0"}
    updates = trace.spans("server 0", "update of")
    for worker in ("worker 0", "worker 1"):
        steps = trace.spans(worker, "exchange")
        assert len(steps) > 1
        for name in ("data", "forward", "backward", "push of", "pull of"):
            assert len(trace.spans(worker, name)) >= len(steps), name
        # each step's updates lie between the beginning and the end of the worker's exchange
        first, last = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
        assert all(first < update["ts"] < last for update in updates)
    waits = trace.spans("server 0", "wait for pushes")
    assert len(waits) == len(updates)
    assert {wait["args"]["last"] for wait in waits} <= {"worker 0", "worker 1"}


def test_the_file_is_json_after_each_write_and_readable_if_one_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGLINE_TIMELINE_JOB", "the test")
    monkeypatch.setattr(recorder.Timeline, "_start", lambda _: None)  # of a thread that writes as long as the process
    path = tmp_path / "trace.json"

    def append(name: str) -> None:
        timeline = recorder.Timeline(path)
        timeline.add_instant(name)
        timeline.write()

    def instants(events: list[dict[str, Any]]) -> list[str]:
        return [event["name"] for event in events if event["ph"] == "i"]

    names = [f"event {number}" for number in range(3)]
    for number, name in enumerate(names, 1):
        append(name)
        assert instants(json.loads(path.read_text())) == names[:number]
    text = path.read_text()
    first = text.index(",\n")
    for length in (*range(first + 2, len(text), 7), len(text) - 1, len(text) - 3):
        path.write_text(text[:length])
        kept = instants(read_events(path))
        assert kept == names[: len(kept)]
        append("appended")
        found = instants(json.loads(path.read_text()))
        assert found == [*names[: len(found) - 1], "appended"]


@pytest.mark.slow
def test_collectives_of_ranks_overlap_and_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = launch(path, "-c", RANK)
    assert done.returncode == 0, done.stderr
    trace = Trace(path)
    trace.check_nesting()
    own, other = trace.spans("rank 0", "all_reduce"), trace.spans("rank 1", "all_reduce")
    assert [e["args"] for e in own] == [e["args"] for e in other]
    assert [e["args"]["bytes"] for e in own] == [40] * 5
    for a, b in zip(own, other, strict=True):  # no rank leaves before the other has entered
        assert max(a["ts"], b["ts"]) <= min(a["ts"] + a["dur"], b["ts"] + b["dur"])


def launch_with_another_clock(folder: Path, program: str, *, servers: int = 0, **variables: object) -> Trace:
    """Run a job whose process of rank 1 has another clock; return its trace."""
    path, shifted = folder / "trace.json", folder / "shifted"
    shifted.write_text('[ "$RANK" = 1 ] && exec unshare --time --monotonic 1000 --fork "$@"\nexec "$@"\n')
    command = ("-m", "gangline", "launch", "-n", "2", "-s", servers, "--timeline", path, "--", "sh", shifted)
    python(*command, sys.executable, "-c", program, code=0, GANGLINE_TIMELINE=path, **variables)
    return Trace(path)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a time namespace needs root")


@needs_root
@pytest.mark.slow
def test_the_clock_of_a_worker_with_another_clock_than_its_scheduler_agrees(tmp_path: Path) -> None:
    limits = {"GANGLINE_TRANSPORT": "tcp", "GANGLINE_HEARTBEAT": 0.1, "REST": 2.5}
    trace = launch_with_another_clock(tmp_path, WORKER, servers=1, **limits)
    clock = trace.clocks["worker 1"]
    assert abs(clock["offset_us"] + 1000e6) <= clock["error_us"]
    assert abs(trace.clocks["server 0"]["offset_us"]) <= trace.clocks["server 0"]["error_us"]


@needs_root
@pytest.mark.slow
def test_clocks_of_ranks_with_another_clock_agree(tmp_path: Path) -> None:
    trace = launch_with_another_clock(tmp_path, RANK)
    clock = trace.clocks["rank 1"]
    assert abs(clock["offset_us"] + 1000e6) <= clock["error_us"]
    assert trace.clocks["rank 0"]["error_us"] == 0


@pytest.mark.slow
def test_another_job_replaces_the_file_and_a_killed_one_leaves_its_spans(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("of something else")
    for _ in range(2):
        done = launch(path, "-c", WORKER, servers=1, REST=2.5, END=1)
        assert done.returncode == 128 + signal.SIGKILL, done.stderr
        trace = Trace(path)
        assert set(trace.clocks) == {"worker 0", "worker 1", "server 0"}
        assert len(trace.spans("worker 0", "pushpull")) == 4


@pytest.mark.slow
def test_an_error_of_the_file_is_reported_once_and_the_job_goes_on(tmp_path: Path) -> None:
    done = launch(tmp_path / "missing" / "trace.json", "-c", RANK)
    assert done.returncode == 0
    assert done.stderr.count("no more timeline is written") == 2  # once for each rank
