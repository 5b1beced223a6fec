"""Output of `gangline launch` on a full disk: the job goes on, and the launcher says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.full_disk import fill, needs_mount, small_disk
from tests.kvstore.test_launch import PYTHON, launch

pytestmark = [needs_mount, pytest.mark.timeout(60)]
LINES = 20_000
CODE = f"for i in range({LINES}): print(i)\nprint('end')"


def test_a_job_goes_on_without_log_files_that_do_not_fit(tmp_path: Path) -> None:
    with small_disk(tmp_path, 64) as disk:
        with launch("-n", "1", "-s", "0", "--log-dir", str(disk), "--", *PYTHON, CODE) as run:
            code, out, errors = run.end()
        assert (code, len(out), out[-1]) == (0, LINES + 1, "[worker 0] end")
        lost = sum(len(str(i)) + 1 for i in range(LINES)) + 4 - (64 << 10)
        assert errors == [
            f"gangline: the disk of {disk} is full: the job goes on, and output that does not fit is lost",
            f"gangline: {lost} bytes of output did not fit on the disk of {disk}",
        ]


def test_a_job_goes_on_if_the_launchers_output_does_not_fit(tmp_path: Path) -> None:
    with small_disk(tmp_path, 64) as disk:
        fill(disk)
        with (disk / "out").open("wb") as out, launch("-n", "1", "-s", "0", "--", *PYTHON, CODE, stdout=out) as run:
            code, _, errors = run.end()
        lost = sum(len(f"[worker 0] {i}\n") for i in range(LINES)) + len("[worker 0] end\n")
    assert code == 0
    assert errors == [
        "gangline: the disk of the launcher's output is full: the job goes on, and output that does not fit is lost",
        f"gangline: {lost} bytes of output did not fit on the disk of the launcher's output",
    ]
