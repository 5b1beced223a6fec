"""Standby: a process that has imported what servers need and waits for its role, so that a restart takes no seconds."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from gangline.launcher.job import Process
from gangline.launcher.process_tree import send_group

_PIPE = 1 << 20
"""Bytes of variables that a process takes before it reads them."""


class Standby:
    """A process that becomes the server that its launcher tells it to be.

    Args:
        environment: variables that it starts with.
        descriptors: file descriptors that it inherits: memory of any server that it may become.
        prepare: function to call in the process before it runs.
    """

    def __init__(self, environment: Mapping[str, str], descriptors: Sequence[int], prepare: Callable[[], None]) -> None:
        self._environment = dict(environment)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "gangline.kvstore.parameter_server.server.standby"],
            env={**os.environ, **environment},
            pass_fds=descriptors,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=prepare,
        )
        assert self.popen.stdin is not None
        fcntl.fcntl(self.popen.stdin, fcntl.F_SETPIPE_SZ, _PIPE)

    def become(self, process: Process, more: Mapping[str, str]) -> bool:
        """Let the process run a server; return False if it has ended.

        Args:
            process: the server.
            more: further variables of its environment.
        """
        environment = process.full_environment({**os.environ, **self._environment, **more})
        assert self.popen.stdin is not None
        try:
            with self.popen.stdin as pipe:
                pipe.write(f"{json.dumps(environment)}\n".encode())
        except BrokenPipeError:
            return False
        return self.popen.poll() is None

    def end(self) -> None:
        """End a process that was not needed."""
        send_group(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                pipe.close()
