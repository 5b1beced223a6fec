"""Identity of processes of this host, and whether they are alive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gangline.collectives.liveness.process_state import state_of

TELL = """
import json
from gangline.collectives.liveness.process_state import this_process
print(json.dumps(this_process()), flush=True)
input()
"""


@pytest.mark.skipif(
    os.getuid() != 0 or not Path("/proc/self/ns/time").exists(), reason="needs root and time namespaces"
)
@pytest.mark.parametrize(
    ("namespace", "state"), [((), "S"), (("unshare", "--time", "--monotonic", "100000", "--boottime", "100000"), "?")]
)
def test_a_process_of_another_time_namespace_cannot_be_observed(namespace: tuple[str, ...], state: str) -> None:
    command = [*namespace, sys.executable, "-c", TELL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert state_of(told) in {state, "R" if state == "S" else state}
        process.communicate(b"\n")
    assert state_of(told) == ("?" if namespace else "")
