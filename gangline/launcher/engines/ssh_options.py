"""Settings of the ssh launcher, apart from it so that `gangline --help` loads little."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SshOptions:
    """Settings of the connections."""

    command: str = "ssh"
    """The ssh command, with further options."""
    python: str = sys.executable
    """Python on the other hosts."""
    interface: str | None = None
    """Network interface, address or network of the job's connections; None: where ssh reaches each host."""
