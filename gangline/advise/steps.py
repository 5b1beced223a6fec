"""Read a timeline: how long each phase of a training step took on each process, and how long it waited for others."""

from __future__ import annotations

import bisect
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

PHASES = ("input", "forward", "backward", "update", "other")
"""Phases of a process's own work in a step."""
COLUMNS = (*PHASES, "late", "transfer")
"""All parts of a step: its phases, waiting for the gradients of slower processes, and the exchange beyond that."""
_FIRST_STEPS = 3
"""Steps at the beginning that are left out: they set up buckets, connections and memory."""
_GRADIENTS = ("all_reduce", "reduce_scatter")
_QUEUED = tuple(f"queue {name}" for name in _GRADIENTS)
_SERVER_UPDATE = "update of"
Event = dict[str, Any]
Span = tuple[float, float, Event]
"""Begin and end in seconds of something that a process did, and its event."""


@dataclass
class Step:
    """One step of one process; all times in seconds on the job's clock."""

    begin: float
    """End of the previous step."""
    end: float
    parts: dict[str, float]
    """Seconds of `COLUMNS`."""
    samples: int
    contexts: dict[str, float]
    """Seconds of forward and backward of each thread that computes."""

    @property
    def work(self) -> float:
        """Seconds of all `PHASES`."""
        return sum(self.parts[name] for name in PHASES)


@dataclass
class ProcessSteps:
    """The steps of a process that trains."""

    name: str
    host: str
    cores: int
    threads: str
    """OMP_NUM_THREADS of the process; "": not set."""
    steps: list[Step]
    waited_for_cores: float
    """Share of the time of its threads in which they were ready to run, but had no core."""
    averages: dict[str, float]
    """Averages of a step: ``bytes`` given to collectives or servers, and of the compression of gradients
    ``compress_seconds``, ``uncompressed_bytes`` and ``compressed_bytes``."""

    def median(self, name: str) -> float:
        """Return the median of one of `COLUMNS`, or of another number of `Step`."""
        return median(step.parts[name] if name in COLUMNS else getattr(step, name) for step in self.steps)

    @property
    def contexts(self) -> dict[str, float]:
        """Median seconds of forward and backward of each context; empty for a process with one."""
        names = sorted({name for step in self.steps for name in step.contexts})
        seconds = {name: median(step.contexts.get(name, 0.0) for step in self.steps) for name in names}
        return seconds if len(seconds) > 1 else {}


@dataclass
class JobSteps:
    """Steps of a training job, read from its timeline."""

    processes: list[ProcessSteps]
    servers: dict[str, tuple[str, float]]
    """Host of each server, and the seconds of a step in which it added up and updated."""

    @property
    def step_seconds(self) -> float:
        """Median time of a step."""
        return median(step.end - step.begin for process in self.processes for step in process.steps)

    @property
    def samples(self) -> int:
        """Median number of samples of all processes in a step; 0 if it is unknown."""
        return sum(int(process.median("samples")) for process in self.processes)

    @property
    def seconds_alone(self) -> float:
        """Median time in a step in which collectives or servers were at work on what all processes had given."""
        return median(process.median("transfer") for process in self.processes)

    def average(self, name: str) -> float:
        """Return the median over the processes of one of their averages."""
        return median(process.averages[name] for process in self.processes)


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
    calls: dict[tuple[int, ...], float] = defaultdict(float)
    rounds: list[float] = []
    traces = {pid: _Trace(own, calls, rounds) for pid, own in of_process.items()}
    rounds.sort()
    processes = [
        ProcessSteps(
            about["name"],
            about["host"],
            about["cores"],
            about.get("threads", ""),
            steps,
            trace.waited_for_cores,
            trace.averages(steps),
        )
        for pid, trace in traces.items()
        if (about := described.get(pid)) is not None and (steps := trace.steps()[_FIRST_STEPS:])
    ]
    if not processes:
        raise ValueError(
            f"the timeline holds no process with more than {_FIRST_STEPS} training steps; record a longer run"
        )
    processes.sort(key=lambda process: (process.name.rstrip("0123456789"), len(process.name), process.name))
    steps, servers = processes[0].steps, {}
    for pid, trace in traces.items():
        name = described.get(pid, {}).get("name", "")
        if name.startswith("server"):
            updates = [one for one in trace.begun(_SERVER_UPDATE, steps[0].begin) if one[1] <= steps[-1].end]
            seconds = sum(end - begin for begin, end, _ in _merged(updates))
            servers[name] = described[pid]["host"], seconds / len(steps)
    return JobSteps(processes, servers)


class _Trace:
    """Events of a process, which adds what others wait for to ``calls`` and ``rounds`` of all processes.

    These are the times at which the last process had given its gradients to a collective, and to a round of a server.
    """

    def __init__(self, events: Sequence[Event], calls: dict[tuple[int, ...], float], rounds: list[float]) -> None:
        self._calls, self._rounds = calls, rounds
        self._threads: dict[int, str] = {}
        self._pushes: list[Event] = []
        self._queued: list[float] = []
        self._spans: dict[str, list[Span]] = defaultdict(list)
        use: Event = {}
        shares, waits = [], set()
        for event in events:
            phase, name, arguments = event["ph"], event["name"], event["args"]
            if phase == "X":
                kind = "gradients" if name in _GRADIENTS else name
                kind = _SERVER_UPDATE if name.startswith(_SERVER_UPDATE) else kind
                self._spans[kind].append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event))
                if "number" in arguments:
                    calls[_call(event)] = max(calls[_call(event)], event["ts"] / 1e6)
            elif phase == "b" and name.startswith("wait for pushes"):
                waits.add(event["id2"]["local"])
            elif phase == "b" and name.startswith("push"):
                self._pushes.append(event)
            elif phase == "b" and name in _QUEUED:
                self._queued.append(event["ts"] / 1e6)
            elif phase == "e" and event["id2"]["local"] in waits:
                rounds.append(event["ts"] / 1e6)
            elif phase == "C" and name == "cores":
                ran, waited = (arguments[key] - use[key] if use else 0.0 for key in ("run_s", "wait_s"))
                use = arguments
                if ran > 0 and waited >= 0:  # else threads have ended, with their times
                    shares.append(waited / (ran + waited))
            elif name == "thread_name":
                self._threads[event["tid"]] = arguments["name"].removeprefix("gangline-").removesuffix("_0")
        self._queued.sort()
        for spans in self._spans.values():
            spans.sort(key=itemgetter(0))
        self._spans["any forward"] = _merged(self._spans["forward"])
        self.waited_for_cores = median(shares or [0.0])

    def begun(self, name: str, begin: float, end: float = float("inf")) -> Iterator[Span]:
        """Yield the spans of a name that have begun between two times."""
        spans = self._spans[name]
        for index in range(bisect.bisect_left(spans, begin, key=itemgetter(0)), len(spans)):
            if spans[index][0] >= end:
                return
            yield spans[index]

    def averages(self, steps: Sequence[Step]) -> dict[str, float]:
        """Return the averages of `ProcessSteps`."""
        begin, end = steps[0].begin, steps[-1].end
        given = [event for _, _, event in self.begun("gradients", begin, end)]
        given += [event for event in self._pushes if begin <= event["ts"] / 1e6 < end]
        compressed = [event for _, _, event in self.begun("compress", begin, end)]
        totals = {
            "bytes": sum(event["args"].get("bytes", 0) for event in given),
            "compress_seconds": sum(event["dur"] for event in compressed) / 1e6,
            "uncompressed_bytes": sum(event["args"]["bytes"] for event in compressed),
            "compressed_bytes": sum(event["args"]["payload_bytes"] for event in compressed),
        }
        return {name: total / len(steps) for name, total in totals.items()}

    def steps(self) -> list[Step]:
        """Return the steps after the first backward; the backwards of several threads before an exchange are one."""
        exchanged = sorted(end for name in ("exchange", "update") for _, end, _ in self._spans[name])
        backwards: list[Span] = []
        threads: set[int] = set()
        for begin, end, event in self._spans["backward"]:
            last = backwards[-1][1] if backwards else begin
            has_ended = bisect.bisect_left(exchanged, last) < bisect.bisect_right(exchanged, begin)
            if backwards and (begin < last or not (has_ended or event["tid"] in threads)):
                backwards[-1] = backwards[-1][0], max(end, last), event
            else:
                backwards.append((begin, end, event))
                threads.clear()
            threads.add(event["tid"])
        ends = []
        for (_, end, _), (following, *_) in pairwise([*backwards, (float("inf"), 0.0, {})]):
            number = bisect.bisect_left(exchanged, following)
            ends.append(max([end, *exchanged[max(number - 1, 0) : number]]))
        return [self._step(began, *backwards[index + 1][:2], ends[index + 1]) for index, began in enumerate(ends[:-1])]

    def _step(self, began: float, backward: float, backward_end: float, end: float) -> Step:
        """Return the step from ``began`` to ``end`` whose backward ran in between."""
        own = list(self.begun("gradients", backward, end))
        exchanges = [one for one in self.begun("exchange", began, end) if backward_end <= one[1] <= end + 1e-9]
        ready = backward_end  # when the process had nothing left but to exchange its gradients
        if own and not exchanges:  # DDP waits for its all-reduces at the end of backward: the last bucket ends the work
            number = bisect.bisect_left(self._queued, backward_end)
            given = [time for time in self._queued[max(number - 1, 0) : number] if time >= backward]
            ready = min(max(given or [span[0] for span in own]), backward_end)
        finish = max((exchange[1] for exchange in exchanges), default=backward_end)
        number = bisect.bisect_right(self._rounds, finish)
        arrived = max([ready, *self._rounds[max(number - 1, 0) : number], *(self._calls[_call(one[2])] for one in own)])
        update = self._total("update", ready, finish) if exchanges else self._total("update", finish, end)
        late = min(arrived - ready, max(finish - ready, 0.0))
        parts = {
            "input": self._total("data", began, backward),
            "forward": self._total("any forward", began, backward),
            "backward": ready - backward,
            "update": update,
            "late": late,
            "transfer": max(finish - ready - late - (update if exchanges else 0.0), 0.0),
        }
        parts["other"] = max(end - began - sum(parts.values()), 0.0)
        samples: dict[int, int] = defaultdict(int)  # of each thread, which computes for one context
        for _, _, event in self.begun("forward", began, end):
            samples[event["tid"]] = max(samples[event["tid"]], event["args"].get("samples", 0))
        contexts: dict[str, float] = defaultdict(float)
        for name in ("forward", "backward"):
            for one, other, event in self.begun(name, began, end):
                contexts[self._threads.get(event["tid"], "")] += other - one
        return Step(began, end, parts, sum(samples.values()), contexts)

    def _total(self, name: str, begin: float, end: float) -> float:
        """Return the seconds of spans that lie between two times."""
        return sum(min(other, end) - one for one, other, _ in self.begun(name, begin, end))


def _call(event: Event) -> tuple[int, ...]:
    """Return what the events of a collective have in common on all its ranks."""
    return itemgetter("group", "ranks", "number")(event["args"])  # type: ignore[no-any-return]


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Return spans of several threads, of which those that overlap have become one."""
    merged: list[Span] = []
    for begin, end, event in spans:
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1]), merged[-1][2]
        else:
            merged.append((begin, end, event))
    return merged
