"""The driver's end of a bench: each side is a process of its own, found its best setting, then measured in turn."""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import gangline

_ROOT = Path(gangline.__file__).resolve().parent.parent
_SERVE = _ROOT / "gangline" / "bench" / "peers" / "serve.py"
_PATIENCE = 600.0  # seconds for one answer: what takes longer hangs
_TRIALS = 2  # runs of a setting that is tried


@dataclass(frozen=True)
class Setting:
    """How a side is run: what the table names, and what the search for the best one varies."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the side's process."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options that its ``prepare`` gets beside those of the bench."""

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in {**self.env, **self.options}.items())


class Side:
    """A side's process, which answers as `bench/peers/serve.py` says; a context manager that ends it."""

    def __init__(self, module: str, env: Mapping[str, str], interpreter: Path | None = None) -> None:
        """Start the process; it does nothing until `prepare`.

        Args:
            module: a file of bench/peers, without its ``.py``.
            env: environment variables to add to this process's.
            interpreter: a Python of the side's own; None: this one.
        """
        self.module = module
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        path = {} if interpreter else {"PYTHONPATH": str(_ROOT)}  # another interpreter must not find our packages
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            [str(interpreter or sys.executable), str(_SERVE), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**inherited, **path, **env},
            start_new_session=True,  # Ctrl-C is the driver's; close() reaches what the side itself started
        )

    def prepare(self, options: Mapping[str, Any]) -> str:
        """Make everything ready to be measured, in place of what was; returns the side's name and version."""
        return str(self._ask({"prepare": dict(options)})["who"])

    def measure(self, budget: float) -> float:
        """Seconds of a step, measured for about ``budget`` seconds."""
        return float(self._ask({"measure": budget})["seconds"])

    def check(self) -> float:
        """The largest absolute error of the last step's results."""
        return float(self._ask({"check": True})["error"])

    def close(self) -> None:
        """End the process, and what it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a side that died says more by its log
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._line()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"the side {self.module} ended with {code}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(f"the side {self.module} failed: {answer['failed']}")
        return answer

    def _line(self) -> str:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(_PATIENCE):
                raise RuntimeError(f"the side {self.module} gave no answer for {_PATIENCE:g} s")
        return self._process.stdout.readline()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Candidate:
    """A side before its setting is chosen."""

    module: str
    options: Mapping[str, Any]
    """What its ``prepare`` gets."""
    settings: Sequence[Setting] = (Setting(),)
    """How it may be run; the quickest is taken."""
    interpreter: Path | None = None


@dataclass(frozen=True)
class Measured:
    """What a side gave, run by run."""

    who: str
    setting: Setting
    seconds: list[float]
    """Of a step; the n-th run of each side was made beside the n-th of the others."""
    error: float | None


def best_settings(candidates: Sequence[Candidate], budget: float) -> list[Setting]:
    """The quickest setting of each candidate.

    A process is started once for all candidates of a module that are to be tried in the same environment. Each runs
    twice and the better counts: noise only ever adds time.

    Args:
        candidates: sides, of any modules.
        budget: about how many seconds a run takes.
    """
    tried = [place for place, candidate in enumerate(candidates) if len(candidate.settings) > 1]
    trials: dict[tuple[str, str], list[tuple[int, Setting]]] = {}
    for place in tried:
        for setting in candidates[place].settings:
            trials.setdefault((candidates[place].module, str(Setting(setting.env))), []).append((place, setting))
    best = [(math.inf, candidate.settings[0]) for candidate in candidates]
    for (module, _), of_process in trials.items():
        place, setting = of_process[0]
        _say(f"trying {module} with {Setting(setting.env)}")
        with Side(module, setting.env, candidates[place].interpreter) as side:
            for place, setting in of_process:
                side.prepare({**candidates[place].options, **setting.options})
                seconds = min(side.measure(budget) for _ in range(_TRIALS))
                if seconds < best[place][0]:
                    best[place] = (seconds, setting)
    return [setting for _, setting in best]


def measure_in_turn(
    candidates: Sequence[Candidate], settings: Sequence[Setting], runs: int, budget: float, *, check: bool = False
) -> list[Measured]:
    """Measure sides one after another, ``runs`` times over: A B A B.

    Args:
        candidates: the sides, all of which are ready, and asleep, while one of them runs.
        settings: how each is run.
        runs: of each side.
        budget: about how many seconds a run takes.
        check: ask for the results' error too.

    Raises:
        RuntimeError: a side failed, ended or hangs.
    """
    with ExitStack() as stack:
        sides = [
            stack.enter_context(Side(candidate.module, setting.env, candidate.interpreter))
            for candidate, setting in zip(candidates, settings, strict=True)
        ]
        names = [
            side.prepare({**candidate.options, **setting.options})
            for side, candidate, setting in zip(sides, candidates, settings, strict=True)
        ]
        seconds: list[list[float]] = [[] for _ in sides]
        _say(f"measuring {', '.join(dict.fromkeys(names))}, {runs} runs each, in turn")
        for _ in range(runs):
            for side, of_side in zip(sides, seconds, strict=True):
                of_side.append(side.measure(budget))
        errors = [side.check() if check else None for side in sides]
    return [Measured(*each) for each in zip(names, settings, seconds, errors, strict=True)]


def ratio(ours: Measured, theirs: Measured) -> float:
    """How many times as fast ours is: the median over the runs, each beside its neighbour."""
    return statistics.median(other / own for own, other in zip(ours.seconds, theirs.seconds, strict=True))


def _say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)
