"""`gangline launch` makes a key for each job: every process gets it, and it appears nowhere."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gangline.collectives.environments.job_key import JobKey, job_key
from tests.kvstore.test_launch import launch

pytestmark = pytest.mark.timeout(60)

_WORKER = """
import os, sys, time
import gangline
from gangline.collectives.environments.job_key import job_key

kv = gangline.create("dist_sync")
key = job_key()
with open(os.open(f"{sys.argv[1]}/key{kv.rank}", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
    file.write(key.hex())
print("job", os.environ["GANGLINE_JOB_ID"], "key", key, flush=True)
os.system("sleep 300 &")
while not os.path.exists(f"{sys.argv[1]}/end"):
    time.sleep(0.05)
raise RuntimeError(f"the test ends {kv.rank} with {key!r}")
"""


def _shown(pid: int) -> bytes:
    """Return what `ps` shows of a process."""
    with suppress(OSError):  # it has ended meanwhile
        return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _descriptors(pid: int) -> list[str]:
    found = []
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(entry))
    return found


@pytest.mark.slow
def test_all_processes_of_a_job_have_its_key_and_it_shows_nowhere(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)
    with launch("-n", "2", "-s", "1", "--", sys.executable, str(script), str(tmp_path)) as job:
        files = [tmp_path / f"key{rank}" for rank in range(2)]
        while not all(file.exists() and file.stat().st_size == 64 for file in files):
            assert job.process.poll() is None, job.end()
            time.sleep(0.05)
        key, other = (JobKey.from_hex(file.read_text()) for file in files)
        assert key == other
        job.hear(f"[worker 0] job {key.job_id()} key JobKey(...)", f"[worker 1] job {key.job_id()} key JobKey(...)")
        running = job.running()
        assert len(running) >= 2 + 4 + 2  # the launcher, scheduler, server and workers, and children of these
        forms = (key.hex().encode(), key.hex().upper().encode(), bytes.fromhex(key.hex()))
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            assert not any(form in _shown(pid) for form in forms), pid
        assert not [pid for pid in running if any("gangline-job-key" in one for one in _descriptors(pid))]
        (tmp_path / "end").touch()
        code, out, errors = job.end()
    assert code == 1
    text = "\n".join(out + errors)
    assert "Traceback" in text
    assert "with JobKey(...)" in text
    assert not any(key.hex()[begin : begin + 8] in text for begin in range(56))


@pytest.mark.slow
def test_each_job_has_a_key_of_its_own() -> None:
    code = "from gangline.collectives.environments.job_key import job_key; print(job_key().job_id())"
    lines = set()
    for _ in range(2):
        with launch("-n", "1", "-s", "0", "--", sys.executable, "-c", code) as job:
            exit_code, out, _ = job.end()
        assert exit_code == 0
        lines.update(out)
    assert len(lines) == 2


def test_a_dry_run_shows_no_key() -> None:
    with launch("-n", "1", "--dry-run", "--", "true") as job:
        code, out, errors = job.end()
    assert code == 0
    assert "JOB_KEY" not in "".join(out + errors)
    assert job_key() is None
