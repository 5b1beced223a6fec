"""Report what bounds a training job, which process and phase, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from gangline.advise.steps import COLUMNS, PHASES, JobSteps

_LEAST_GAIN = 0.1
"""Share of a step that a remedy must be able to save."""
_PAUSE = 5.0
"""A step this many times as long as the median, in which all others wait for one process, is a pause."""
_LEAST_WAIT = 0.25
"""Share of its threads' time in which a process waits for cores that are oversubscribed."""
_MOST_OF_EXCHANGE = 0.5
"""Share of the exchange from which a server's arithmetic, not the link, is its cause."""
_FAST_BYTES = 0.5e9
"""Bytes per second below which a link, not the cores, limits an exchange."""
_LEAST_SECONDS = 1e-4
"""Shortest exchange that the rate of a link is computed from."""
_SMALL_SECONDS = 0.005
"""Seconds of a step's work below which the fixed costs of its many small operations dominate."""


@dataclass(frozen=True)
class Remedy:
    """Something to do."""

    text: str
    command: str
    gain: float
    """Share of a sample's time that it can save at most."""
    options: tuple[str, ...] = ()
    """Options of `gangline train` that apply it."""
    batches: int = 1
    """Factor of the batch size that applies it."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables that apply it."""


@dataclass(frozen=True)
class Finding:
    """A cause that makes steps longer."""

    cause: str
    """"input", "forward", "backward", "compute", "update", "communication", "compression", "server", "small steps",
    "cores" or "pause"."""
    process: str
    """Name of the process at fault; "" if it is all of them."""
    gain: float
    """Share of the step time that would be saved without it."""
    text: str
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True)
class Advice:
    """The findings of a job, the largest gain first; none: there is nothing to gain."""

    step_seconds: float
    samples: int
    findings: tuple[Finding, ...]
    table: tuple[dict[str, Any], ...]
    """Milliseconds of each phase of each process."""

    @property
    def verdict(self) -> str:
        """The verdict in one line."""
        if not self.findings:
            return "nothing to gain: every process computes nearly all the time"
        return self.findings[0].text

    @property
    def samples_per_second(self) -> float:
        """Samples of all processes in a second; 0 if their number is unknown."""
        return self.samples / self.step_seconds

    def remedy(self) -> Remedy | None:
        """Return the first remedy that `gangline advise --verify` can apply to a command."""
        remedies = (remedy for finding in self.findings for remedy in finding.remedies)
        return next((one for one in remedies if one.options or one.variables or one.batches > 1), None)

    def as_json(self) -> dict[str, Any]:
        """Return it for json.dumps."""
        return {**asdict(self), "verdict": self.verdict}

    def __str__(self) -> str:
        rate = f", {self.samples_per_second:.0f} samples/s" if self.samples else ""
        lines = [f"Step: {self.step_seconds * 1e3:.1f} ms{rate} (medians)", ""]
        lines.append(f"{'ms in a step':<14}" + "".join(f"{name:>10}" for name in COLUMNS))
        lines += [f"{row['process']:<14}" + "".join(f"{row[name]:>10.1f}" for name in COLUMNS) for row in self.table]
        lines += ["", f"Verdict: {self.verdict}"]
        for finding in self.findings:
            if finding is not self.findings[0]:
                lines.append(f"Also: {finding.text}")
            for remedy in finding.remedies:
                gain = f" (up to {remedy.gain:.0%} of the step)" if remedy.gain else ""
                lines.append(f"  - {remedy.text}{gain}: {remedy.command}")
        return "\n".join(lines)


def advise(job: JobSteps) -> Advice:
    """Return what bounds the steps of a job."""
    checks: tuple[Callable[[JobSteps], Iterator[Finding]], ...] = (
        _pauses,
        _busy_cores,
        _slow_processes,
        _slow_contexts,
        _input,
        _compression,
        _exchange,
        _small_steps,
    )
    findings = [finding for check in checks for finding in check(job) if finding.gain >= _LEAST_GAIN]
    table = tuple(
        {"process": process.name, **{name: process.median(name) * 1e3 for name in COLUMNS}} for process in job.processes
    )
    ordered = sorted(findings, key=lambda finding: -finding.gain)
    return Advice(job.step_seconds, job.samples, tuple(ordered), table)


def _pauses(job: JobSteps) -> Iterator[Finding]:
    """Find steps in which all others waited long for one process, though it is usually not slow."""
    for process in job.processes:
        typical = process.median("work")
        paused = [step.work - typical for step in process.steps]
        paused = [seconds for seconds in paused if seconds > max(_PAUSE * job.step_seconds, 0.2)]
        others = [max(step.parts["late"] for step in one.steps) for one in job.processes if one is not process]
        if paused and others and min(others) > max(paused) / 2:
            times = "once" if len(paused) == 1 else f"{len(paused)} times"
            text = (
                f"{process.name} on {process.host} stood still {times}, up to {max(paused):.1f} s; all others waited "
                "for it"
            )
            share = sum(paused) / sum(step.end - step.begin for step in process.steps)
            remedy = Remedy("find what stops it: another job, swapping, a full disk", "gangline check", 0.0)
            yield Finding("pause", process.name, max(share, _LEAST_GAIN), text, (remedy,))


def _busy_cores(job: JobSteps) -> Iterator[Finding]:
    """Find processes whose threads wait for cores."""
    worst = max(job.processes, key=lambda process: process.waited_for_cores)
    if worst.waited_for_cores <= _LEAST_WAIT:
        return
    share = worst.waited_for_cores * worst.median("work") / job.step_seconds
    of_host = [process for process in job.processes if process.host == worst.host]
    count = len(of_host)
    text = (
        f"the cores of {worst.host} are oversubscribed: threads of {worst.name} were ready to run, but without a core, "
        f"for {worst.waited_for_cores:.0%} of their time ({count} training process{'es' * (count > 1)}, "
        f"{worst.cores} cores)"
    )
    threads = "OMP_NUM_THREADS=1, or torch.set_num_threads(1)"
    processes = "gangline launch -n N, torchrun --nproc-per-node N"
    fewer = Remedy("fewer threads in each process", threads, share, variables=(("OMP_NUM_THREADS", "1"),))
    others = Remedy("fewer processes on this host, or other programs off it", processes, share)
    has_one = all(process.threads == "1" for process in of_host)
    yield Finding("cores", "", share, text, (others,) if has_one else (fewer, others))


def _slow_processes(job: JobSteps) -> Iterator[Finding]:
    """Find the process that the others wait for, and the phases in which it is slower than they are."""
    slowest = min(job.processes, key=lambda process: process.median("late"))
    others = [process for process in job.processes if process is not slowest]
    if not others:
        return
    of_others = {name: median(process.median(name) for process in others) for name in (*PHASES, "late", "samples")}
    lost = of_others["late"] - slowest.median("late")
    gain = lost / job.step_seconds
    excess = {phase: slowest.median(phase) - of_others[phase] for phase in PHASES}
    phase = where = max(excess, key=lambda name: excess[name])
    more, samples = excess[phase], slowest.median("samples")
    has_more = 0 < 1.1 * of_others["samples"] < samples
    if min(excess["forward"], excess["backward"]) > 0.2 * lost or (has_more and phase in ("forward", "backward")):
        phase, where, more = "compute", "forward and backward", excess["forward"] + excess["backward"]
    text = (
        f"{slowest.name} on {slowest.host} is slow in {where}: {_ms(more)} more than the others in a step of "
        f"{_ms(job.step_seconds)}, for which they wait"
    )
    balance = Remedy("give each process samples by its speed", "gangline.balance(model, loader)", gain)
    remedies = (balance, Remedy("look for other programs on its host", "gangline check", gain))
    if phase == "compute" and has_more:
        text += f"; it has {samples:.0f} samples, the others {of_others['samples']:.0f}"
        remedies = (Remedy("divide the samples evenly", "DistributedSampler(dataset)", gain), balance)
    yield Finding(phase, slowest.name, gain, text, (_read_in_parallel(gain),) if phase == "input" else remedies)


def _slow_contexts(job: JobSteps) -> Iterator[Finding]:
    """Find contexts of one process that compute longer than its others."""
    for process in job.processes:
        if contexts := process.contexts:
            slowest = max(contexts, key=contexts.__getitem__)
            gain = (contexts[slowest] - fmean(contexts.values())) / job.step_seconds
            words = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in contexts.items())
            text = f"{slowest} of {process.name} is slow in forward and backward, and the other contexts wait: {words}"
            option = ("--work-load-list", "auto")
            remedy = Remedy("divide batches by the measured speed of the contexts", " ".join(option), gain, option)
            yield Finding("compute", slowest, gain, text, (remedy,))


def _input(job: JobSteps) -> Iterator[Finding]:
    least = min(process.median("input") for process in job.processes)
    share = least / job.step_seconds
    text = f"all processes wait for input: {_ms(least)} of a step of {_ms(job.step_seconds)}"
    copies = Remedy("copy to GPUs while they compute", "DataLoader(..., pin_memory=True)", share)
    yield Finding("input", "", share, text, (_read_in_parallel(share), copies))


def _read_in_parallel(gain: float) -> Remedy:
    return Remedy("read in parallel", "DataLoader(..., num_workers=2, persistent_workers=True)", gain)


def _compression(job: JobSteps) -> Iterator[Finding]:
    """Find compression that takes longer than the link would take for the bytes that it saves."""
    seconds, given, sent = map(job.average, ("compress_seconds", "uncompressed_bytes", "compressed_bytes"))
    if not seconds or not job.seconds_alone:
        return
    computing = max((busy for _, busy in job.servers.values()), default=0.0)
    moved = sent + (given if job.servers else 0.0)  # servers send weights back, which are not compressed
    rate = moved / max(job.seconds_alone - computing, _LEAST_SECONDS)
    saved = (given - sent) / rate
    text = (
        f"compression does not pay: it takes {_ms(seconds)} of a step, and the link, {rate / 1e6:.0f} MB/s, would "
        f"carry the {(given - sent) / 1e6:.1f} MB that it saves in {_ms(saved)}"
    )
    gain = (seconds - saved) / job.step_seconds
    remedy = Remedy("send gradients as they are", "no --gc-type, no compress_hook", gain)
    yield Finding("compression", "", gain, text, (remedy,))


def _exchange(job: JobSteps) -> Iterator[Finding]:
    """Find exchanges that take long though nobody is late, and the server whose sums and updates are most of one."""
    seconds, count = job.seconds_alone, len(job.servers)
    name, (host, busy) = max(job.servers.items(), key=lambda item: item[1][1], default=("", ("", -1.0)))
    of_step = f"of a step of {_ms(job.step_seconds)}"
    if busy >= _MOST_OF_EXCHANGE * seconds:
        share = busy / job.step_seconds
        text = f"{name} on {host} adds up gradients and updates weights for {_ms(busy)} {of_step}, for which the "
        text += "workers wait"
        if count > 1:
            text += f"; the fastest server needs {_ms(min(other for _, other in job.servers.values()))}"
        remedies = [
            Remedy("place servers on faster hosts, or none on this one", "gangline launch -s N -H HOSTS", share / 2),
            Remedy("more servers, which share the keys", f"gangline launch -s {count + 1}", share / 2),
            Remedy("update on the workers instead", "--kv-store allreduce", share / 2),
        ]
        yield Finding("server", name, share, text, tuple(remedies))
    elif len(job.processes) > 1 and seconds:
        share, moved = seconds / job.step_seconds, job.average("bytes")
        text = f"communication: the exchange of {moved / 1e6:.1f} MB takes {_ms(seconds)} {of_step}"
        larger = "larger batches, so that a step has more work for the same bytes"
        remedies = [
            Remedy(larger, "twice --batch-size", share / 2, batches=2),
            Remedy("fewer processes", "gangline launch -n 1, torchrun --nproc-per-node 1", share),
        ]
        if moved / seconds < _FAST_BYTES and moved > 1e5:
            text += f", {moved / seconds / 1e6:.0f} MB/s"
            fp16 = Remedy("compress gradients", "--gc-type fp16, or 2bit", share / 2, ("--gc-type", "fp16"))
            remedies.insert(0, fp16)
        yield Finding("communication", "", share, text, tuple(remedies))


def _small_steps(job: JobSteps) -> Iterator[Finding]:
    of_contexts = [seconds for process in job.processes for seconds in process.contexts.values()]
    work = median(of_contexts or [step.work for process in job.processes for step in process.steps])
    if work > _SMALL_SECONDS or len(job.processes) + len(of_contexts) < 2:
        return
    share = 1 - work / job.step_seconds
    unit, fewer = ("context", "gangline train --cpus 1") if of_contexts else ("process", "gangline launch -n 1")
    text = (
        f"a step has only {work * 1e3:.1f} ms of work in each {unit}, beside {job.step_seconds * 1e3 * share:.1f} ms "
        "to start it, to wait for the others and to add up its result"
    )
    remedies = (
        Remedy("larger batches", "four times --batch-size", share * 3 / 4, batches=4),
        Remedy(f"one {unit}, which has nobody to wait for", fewer, share),
    )
    yield Finding("small steps", "", share, text, remedies)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{0 if seconds > 0.01 else 1 if seconds > 0.001 else 2}f} ms"
