"""Parameter-server jobs whose workers report to the test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.client.server_client import ServerClient
from tests.collectives.processes import Bare
from tests.collectives.stage import WAITS, Actor, Audience
from tests.kvstore.parameter_server.processes import DistJob

_SERVER, _SCHEDULER = 100, 200
"""Offsets of server and scheduler numbers among the processes of a stage."""


class DistStage(Audience):
    """Job whose workers run ``play(path, *arguments)`` and connect to the stage once the job has started.

    Its outcomes are those of scheduler, servers and workers in this order.
    """

    opener: type[Bare] = Bare

    def __init__(self, play: Callable[..., Any], workers: int, servers: int, *arguments: Any, **more: str) -> None:
        super().__init__()
        try:
            cache = str(Path(self.path).with_name("cache"))  # caches of libraries do not count as files left behind
            with patch.dict(
                os.environ, {**self.environment, "XDG_CACHE_HOME": cache, "XDG_CONFIG_HOME": cache, **more}
            ):
                job = DistJob(play, workers, servers, self.path, *arguments, opener=self.opener)
                self._job = self._stack.enter_context(job)
            self._ending = self._stack.enter_context(ThreadPoolExecutor(1)).submit(self._job.outcomes)
            places = [("worker", rank, rank) for rank in range(workers)]
            places += [("server", rank, _SERVER + rank) for rank in range(servers)]
            for role, rank, number in [*places, ("scheduler", 0, _SCHEDULER)]:
                self._know(number, self._job.pid(role, rank))
                self._stack.callback(self.signal, number, signal.SIGKILL)
            self.admit(workers, self._ending.done)
        except BaseException:
            self.close()
            raise

    def kill_scheduler(self) -> None:
        self.kill(_SCHEDULER)


class Waits:
    """Reports to the stage, once `due` is set, that a worker waits inside a call."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.due = False
        self._tell_before(SchedulerClient, "_wait")
        self._tell_before(ServerClient, "wait")

    def _tell_before(self, cls: Any, name: str) -> None:
        inner = getattr(cls, name)

        def waits(own: Any, *args: Any) -> Any:
            if self.due:
                self.due = False
                self._actor.tell(WAITS)
            return inner(own, *args)

        setattr(cls, name, waits)
