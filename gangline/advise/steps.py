"""Read a timeline: how long each phase of a training step took on each process, and how long it waited for others."""

from __future__ import annotations

import bisect
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

PHASES = ("input", "forward", "backward", "update", "other")
"""Phases of a process's own work in a step."""
COLUMNS = (*PHASES, "late", "transfer")
"""All parts of a step, by their names in tables."""
_FIRST_STEPS = 3
"""Steps at the beginning that are left out: they set up buckets, connections and memory."""
_QUEUED = ("queue all_reduce", "queue reduce_scatter")
Event = dict[str, Any]
Span = tuple[float, float, Event]
"""Begin and end in seconds of something that a process did, and its event."""


@dataclass
class Step:
    """One step of one process; all times in seconds on the job's clock."""

    begin: float
    """End of the previous step."""
    end: float
    ready: float
    """Time at which the process had computed its gradients and had nothing left but to exchange them."""
    phases: dict[str, float]
    """Seconds of `PHASES`."""
    late: float = 0.0
    """Seconds for which it waited for the gradients of slower processes."""
    transfer: float = 0.0
    """Seconds of the exchange beyond that."""
    samples: int = 0
    contexts: dict[str, float] = field(default_factory=dict)
    """Seconds of forward and backward of each thread that computes."""

    @property
    def work(self) -> float:
        """Seconds of all `PHASES`."""
        return sum(self.phases.values())


@dataclass
class ProcessSteps:
    """The steps of a process that trains."""

    name: str
    host: str
    cores: int
    steps: list[Step] = field(default_factory=list)
    waited_for_cores: float = 0.0
    """Share of the time of its threads in which they were ready to run, but had no core."""

    def median(self, name: str) -> float:
        """Return the median of a phase, or of another number of `Step`."""
        return median(step.phases[name] if name in PHASES else getattr(step, name) for step in self.steps)

    @property
    def contexts(self) -> dict[str, float]:
        """Median seconds of forward and backward of each context; empty for a process with one."""
        names = {name for step in self.steps for name in step.contexts}
        if len(names) < 2:
            return {}
        return {name: median(step.contexts.get(name, 0.0) for step in self.steps) for name in sorted(names)}


@dataclass(frozen=True)
class Compressing:
    """Compression of gradients by one process in a step, medians over the processes."""

    seconds: float
    given: float
    """Bytes of the gradients."""
    sent: float
    """Bytes of their payloads."""


@dataclass
class JobSteps:
    """Steps of a training job, read from its timeline."""

    processes: list[ProcessSteps]
    bytes_per_step: float
    """Bytes that one process gives to collectives or servers in a step."""
    seconds_alone: float
    """Median time in a step in which collectives or servers were at work on what all processes had given."""
    compression: Compressing | None = None
    """Compression of a process in a step; None: it compresses nothing."""
    servers: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Host of each server, and the seconds of a step in which it added up and updated."""

    @property
    def step_seconds(self) -> float:
        """Median time of a step."""
        return median(step.end - step.begin for process in self.processes for step in process.steps)

    @property
    def samples(self) -> int:
        """Median number of samples of all processes in a step; 0 if it is unknown."""
        return sum(int(process.median("samples")) for process in self.processes)


def read_events(path: Path) -> list[Event]:
    """Return the events of a trace file."""
    text = path.read_text()
    try:
        try:
            events = json.loads(text)
        except ValueError:  # a process was killed while it wrote the last event
            events = json.loads(text[: text.rfind(",\n")] + "]")
    except ValueError as error:
        raise ValueError(f"{path} is no timeline: {error}") from error
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{path} is no timeline: expected a list of events")
    for event in events:
        event.setdefault("args", {})
    return events


def steps_of(events: Iterable[Event]) -> JobSteps:
    """Return the steps of all processes that train.

    A step ends where the exchange of gradients of one backward and the update have ended: at the last of these spans
    before the next backward.

    Raises:
        ValueError: if no process has trained for enough steps.
    """
    of_process: dict[int, list[Event]] = defaultdict(list)
    described: dict[int, Event] = {}
    for event in events:
        if event["name"] == "gangline_process":
            described[event["pid"]] = event["args"]
        else:
            of_process[event["pid"]].append(event)
    arrivals = _Arrivals(event for own in of_process.values() for event in own)
    processes, volumes, transfers, compressed = [], [], [], []
    for pid, own in of_process.items():
        if pid not in described:
            continue
        process = ProcessSteps(described[pid]["name"], described[pid]["host"], described[pid]["cores"])
        threads = {e["tid"]: e["args"]["name"] for e in own if e["name"] == "thread_name"}
        process.steps = _steps(own, arrivals, threads)[_FIRST_STEPS:]
        process.waited_for_cores = _waited_for_cores(own)
        if process.steps:
            processes.append(process)
            begin, end = process.steps[0].begin, process.steps[-1].end
            given = [e["args"].get("bytes", 0) for e in own if _is_gradient(e) and begin <= e["ts"] / 1e6 < end]
            volumes.append(sum(given) / len(process.steps))
            spans = [e for e in own if e["name"] == "compress" and begin <= e["ts"] / 1e6 < end]
            totals = [
                sum(e["dur"] for e in spans) / 1e6,
                *(sum(e["args"][name] for e in spans) for name in ("bytes", "payload_bytes")),
            ]
            compressed.append([total / len(process.steps) for total in totals])
            transfers.append(process.median("transfer"))
    if not processes:
        raise ValueError(
            f"the timeline holds no process with more than {_FIRST_STEPS} training steps; record a longer run"
        )
    processes.sort(key=lambda process: (process.name.rstrip("0123456789"), len(process.name), process.name))
    job = JobSteps(processes, median(volumes), median(transfers))
    if any(seconds for seconds, _, _ in compressed):
        job.compression = Compressing(*(median(values) for values in zip(*compressed, strict=True)))
    steps = processes[0].steps
    for pid, own in of_process.items():
        name = described.get(pid, {}).get("name", "")
        if name.startswith("server"):
            updates = [_span(e) for e in own if e["ph"] == "X" and e["name"].startswith("update of")]
            within = [span for span in updates if steps[0].begin <= span[0] and span[1] <= steps[-1].end]
            busy = _merged(sorted(within, key=itemgetter(0)))
            job.servers[name] = described[pid]["host"], sum(e - b for b, e, _ in busy) / len(steps)
    return job


def _span(event: Event) -> Span:
    """Return a complete event as begin and end in seconds, and the event itself."""
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event


def _is_gradient(event: Event) -> bool:
    """Return whether an event is the exchange of gradients."""
    return (event["ph"] == "X" and event["name"] in ("all_reduce", "reduce_scatter")) or (
        event["ph"] == "b" and event["name"].startswith("push")
    )


class _Arrivals:
    """When the last process had given its gradients, for each collective and each round of a server."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._calls: dict[tuple[str, int, int], float] = defaultdict(float)
        rounds = set()
        closed = []
        for event in events:
            if event["ph"] == "X" and "number" in event["args"]:
                call = self._call_of(event)
                self._calls[call] = max(self._calls[call], event["ts"] / 1e6)
            elif event["ph"] == "b" and event["name"].startswith("wait for pushes"):
                rounds.add((event["pid"], event["id2"]["local"]))
            elif event["ph"] == "e" and (event["pid"], event["id2"]["local"]) in rounds:
                closed.append(event["ts"] / 1e6)
        self._closed = sorted(closed)

    @staticmethod
    def _call_of(event: Event) -> tuple[str, int, int]:
        arguments = event["args"]
        return arguments["group"], arguments["ranks"], arguments["number"]

    def last(self, calls: Iterable[Event], begin: float, end: float) -> float:
        """Return the last arrival in these collectives, or in rounds between two times; ``begin`` if there is none."""
        number = bisect.bisect_right(self._closed, end)
        rounds = self._closed[number - 1 : number]
        times: list[float] = [begin, *rounds, *(self._calls[self._call_of(event)] for event in calls)]
        return max(times)


def _steps(events: Sequence[Event], arrivals: _Arrivals, threads: Mapping[int, str]) -> list[Step]:
    spans: dict[str, list[Span]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["name"]].append(_span(event))
    for own in spans.values():
        own.sort(key=itemgetter(0))
    backwards = _merged(spans["backward"])
    exchange_ends = sorted(end for name in ("exchange", "update") for _, end, _ in spans[name])
    gradients = sorted([*spans["all_reduce"], *spans["reduce_scatter"]], key=itemgetter(0))
    forwards = _merged(spans["forward"])
    queued = sorted(e["ts"] / 1e6 for e in events if e["ph"] == "b" and e["name"] in _QUEUED)
    steps: list[Step] = []
    previous = None
    for index, (begin, end, _) in enumerate(backwards):
        following = backwards[index + 1][0] if index + 1 < len(backwards) else float("inf")
        number = bisect.bisect_left(exchange_ends, following)
        last = max(end, exchange_ends[number - 1] if number else end)
        if previous is not None:
            steps.append(_step(previous, begin, end, last, spans, forwards, gradients, queued, arrivals))
            steps[-1].contexts = _contexts(spans, previous, last, threads)
        previous = last
    return steps


def _step(
    began: float,
    backward: float,
    backward_end: float,
    end: float,
    spans: dict[str, list[Span]],
    forwards: Sequence[Span],
    gradients: Sequence[Span],
    queued: Sequence[float],
    arrivals: _Arrivals,
) -> Step:
    """Return a step from ``began`` to ``end`` whose backward ran in between."""
    own = list(_begun(gradients, backward, end))
    exchanges = [span for span in _begun(spans["exchange"], began, end) if backward_end <= span[1] <= end + 1e-9]
    ready = backward_end
    if own and not exchanges:  # DDP waits for its all-reduces at the end of backward: the last bucket ends the work
        number = bisect.bisect_left(queued, backward_end)
        given = [time for time in queued[number - 1 : number] if time >= backward]
        ready = min(max(given or [span[0] for span in own]), backward_end)
    finish = max([exchange[1] for exchange in exchanges], default=backward_end)
    arrived = arrivals.last((event for _, _, event in own), ready, finish)
    update = _total(spans["update"], finish, end) if not exchanges else _total(spans["update"], ready, finish)
    phases = {
        "input": _total(spans["data"], began, backward),
        "forward": _total(forwards, began, backward),
        "backward": ready - backward,
        "update": update,
    }
    late = min(max(arrived - ready, 0.0), max(finish - ready, 0.0))
    transfer = max(finish - ready - late - (update if exchanges else 0.0), 0.0)
    phases["other"] = max(end - began - sum(phases.values()) - late - transfer, 0.0)
    samples = max((e["args"].get("samples", 0) for _, _, e in _begun(spans["forward"], began, backward)), default=0)
    return Step(began, end, ready, phases, late, transfer, samples)


def _contexts(
    spans: Mapping[str, Sequence[Span]], begin: float, end: float, threads: Mapping[int, str]
) -> dict[str, float]:
    """Return the seconds of forward and backward of each thread between two times."""
    seconds: dict[str, float] = defaultdict(float)
    for name in ("forward", "backward"):
        for one, other, event in _begun(spans.get(name, ()), begin, end):
            thread = threads.get(event["tid"], "").removeprefix("gangline-").removesuffix("_0")
            seconds[thread] += other - one
    return dict(seconds)


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Return spans of several threads, of which those that overlap have become one."""
    merged: list[Span] = []
    for begin, end, event in spans:
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1]), merged[-1][2]
        else:
            merged.append((begin, end, event))
    return merged


def _begun(spans: Sequence[Span], begin: float, end: float) -> Iterator[Span]:
    """Yield the spans that have begun between two times; ``spans`` are in that order."""
    first = bisect.bisect_left(spans, begin, key=itemgetter(0))
    for index in range(first, len(spans)):
        if spans[index][0] >= end:
            return
        yield spans[index]


def _total(spans: Sequence[Span], begin: float, end: float) -> float:
    """Return the seconds of spans that lie between two times."""
    return sum(min(other, end) - one for one, other, _ in _begun(spans, begin, end))


def _waited_for_cores(events: Sequence[Event]) -> float:
    """Return the share of its threads' time in which they were ready to run and had no core."""
    use = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "cores"]
    shares = []
    for one, following in pairwise(use):
        ran, waited = (following[name] - one[name] for name in ("run_s", "wait_s"))
        if ran > 0 and waited >= 0:  # else threads have ended, with their times
            shares.append(waited / (ran + waited))
    return median(shares) if shares else 0.0
