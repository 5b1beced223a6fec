"""Scripted faults for tests: GANGLINE_FAULT="server 1 kill at close 7; worker 0.1 break at push-sent 3".

A fault happens at the n-th event of a named point in one process, never by time or chance. Where the variable is not
set, `script_of` returns None and no code below runs.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

from gangline.collectives.environments.restart import incarnation

VARIABLE = "GANGLINE_FAULT"
_log = logging.getLogger("gangline")

_COMMON = ("join", "leave")
_DATA = ("hello", "define", "pull", "ack", "values", "done", "command", "result")
_CALLS = ("meet", "barrier", "met")
POINTS: Mapping[str, tuple[str, ...]] = {
    "worker": (*_COMMON, *_CALLS, *_DATA, "push-sent", "view"),
    "server": (*_COMMON, *_DATA, "push-taken", "update", "close", "view"),
    "scheduler": (*_COMMON, *_CALLS, "view"),
    "rank": ("collective",),
}
"""Points of each role. All but update, close and collective are messages sent or received by the process."""
_NOT_MESSAGES = ("update", "close", "collective")
ACTIONS = ("kill", "stop", "stop for N s", "break", "repeat", "swap")
_FORM = re.compile(
    r"(?P<role>[^\s.]+)(?:(?: (?P<rank>\d+))?(?:\.(?P<incarnation>\d+))?)? (?P<action>\S+)"
    r"(?: for (?P<seconds>\d+(?:\.\d+)?) s)?"
    r" at (?P<point>\S+) (?P<number>\d+)"
)


class Fault(NamedTuple):
    """One fault of a script."""

    role: str
    rank: int
    """0 for the scheduler."""
    action: str
    seconds: float | None
    """Seconds after which a stopped process continues; None: never."""
    point: str
    number: int
    """Number of the event, from 1."""
    text: str
    incarnation: int = 0
    """Number of earlier restarts of the process."""


def parse(text: str) -> list[Fault]:
    """Return the faults of a script.

    Raises:
        ValueError: if a part of the script is invalid; the message names the part, its position and what is allowed.
    """
    faults = []
    begin = 0
    for part in text.split(";"):
        at = begin + len(part) - len(part.lstrip())
        begin += len(part) + 1
        if words := " ".join(part.split()):
            faults.append(_parsed(words, f"{VARIABLE} has {words!r} at character {at}"))
    return faults


def _parsed(words: str, where: str) -> Fault:
    found = _FORM.fullmatch(words)
    if found is None:
        raise ValueError(f"{where}; expected such as 'server 1 kill at close 7' or 'scheduler stop for 5 s at meet 2'")
    role, action, point = found["role"], found["action"], found["point"]
    seconds = None if found["seconds"] is None else float(found["seconds"])
    if role not in POINTS:
        raise ValueError(f"{where} with role {role!r}; expected {_either(POINTS)}")
    if (found["rank"] is None) != (role == "scheduler"):
        raise ValueError(f"{where}; expected a number after worker, server or rank, and none after scheduler")
    if action not in [one.split()[0] for one in ACTIONS] or (seconds is not None and action != "stop"):
        raise ValueError(f"{where} with action {action!r}; expected {_either(ACTIONS)}")
    if point not in POINTS[role]:
        raise ValueError(f"{where} with point {point!r}; a {role} has the points {_either(POINTS[role])}")
    if point in _NOT_MESSAGES and action not in ("kill", "stop"):
        raise ValueError(f"{where}; {point} is no message, so only kill and stop are possible there")
    if int(found["number"]) < 1:
        raise ValueError(f"{where} with event 0; expected a number from 1")
    again = int(found["incarnation"] or 0)
    return Fault(role, int(found["rank"] or 0), action, seconds, point, int(found["number"]), words, again)


def _either(words: Collection[str]) -> str:
    return ", ".join(words)


def script_of(role: str, rank: int) -> Script | None:
    """Return the script of a process; None if GANGLINE_FAULT is not set.

    Args:
        role: "worker", "server", "scheduler" or "rank".
        rank: -1 if it is not known yet: until it is, the faults of all ranks of the role count.

    Raises:
        ValueError: if the script is invalid.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    return Script([fault for fault in parse(text) if fault.incarnation == incarnation()], role, rank)


class Script:
    """Faults of one process, which counts its events.

    Args:
        faults: of all processes.
        role: of this process.
        rank: of this process; -1: not known yet. Assign it when it is.
    """

    def __init__(self, faults: Collection[Fault], role: str, rank: int) -> None:
        self.rank = rank
        self._faults = [fault for fault in faults if fault.role == role]
        self._counts: Counter[str] = Counter()
        self._held: dict[object, Callable[[], object]] = {}  # messages to exchange with the next, by connection

    def reach(self, point: str) -> Fault | None:
        """Count an event; kill or stop this process if the script says so, or return a fault of a message."""
        self._counts[point] += 1
        event = point, self._counts[point]
        found = None
        for fault in self._faults:
            if (fault.point, fault.number) == event and self.rank in (-1, fault.rank):
                _log.warning("%s: %s", VARIABLE, fault.text)
                if fault.action == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault.action == "stop":
                    _stop(fault.seconds)
                else:
                    found = fault
        return found

    def pass_on(
        self, points: Collection[str], line: object, act: Callable[[], object], cut: Callable[[], object]
    ) -> None:
        """Send or handle a message, unless the script has a fault at one of its points.

        Args:
            points: points of the message.
            line: the connection: a message changes places with the next one of the same connection.
            act: sends or handles the message.
            cut: breaks the connection.
        """
        found = [fault.action for point in points if (fault := self.reach(point)) is not None]
        if "break" in found:
            self._held.pop(line, None)
            cut()
        elif "swap" in found and line not in self._held:
            self._held[line] = act
        else:
            act()
            if "repeat" in found:
                act()
            if (held := self._held.pop(line, None)) is not None:
                held()

    def release(self) -> None:
        """Send or handle held messages, because no other message follows."""
        while self._held:
            self._held.popitem()[1]()


def _stop(seconds: float | None) -> None:
    """Stop this process; a helper continues it after some seconds, unless ``seconds`` is None."""
    own = os.getpid()
    if seconds is not None:
        code = f"import os, signal, time; time.sleep({seconds}); os.kill({own}, signal.SIGCONT)"
        subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)  # noqa: S603  numbers only
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # kill() would let this thread run on for a moment


def shut_down_connections(port: int) -> None:
    """Break this process's TCP connections from or to a port, as a lost network would, in both directions."""
    for name in os.listdir("/proc/self/fd"):
        shut_down(int(name), port)


def shut_down(descriptor: int, port: int | None = None) -> None:
    """Break the TCP connection of a descriptor, if it is one and has this port (None: any)."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
            ports = one.getpeername()[1], one.getsockname()[1]  # OSError: it only listens
            if port is None or port in ports:
                one.shutdown(socket.SHUT_RDWR)
