"""Tests of the merged output of many processes: whole lines with prefixes, in a pipe as on a terminal."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangline.launcher import output
from gangline.launcher.output import Output
from tests.full_disk import fill, needs_mount, small_disk
from tests.kvstore.test_launch import PYTHON, launch


class Log:
    """An `Output` to a pipe, with a stream of two processes each."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self.output = Output(self._write, self._write)
        self.zero = self.output.stream("worker 0", is_error=False)
        self.one = self.output.stream("worker 1", is_error=True)

    def text(self) -> bytes:
        """Return what was written since the last call."""
        found = b""
        while select.select([self._read], [], [], 0)[0]:
            found += os.read(self._read, 1 << 16)
        return found

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.close()


GARBAGE = bytes(byte for byte in range(256) if byte not in b"\r\n")


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        ([b"loading", b" done\n\nnext\nand"], [b"loading done", b"", b"next"]),
        ([b"\r 0%", b"\r 50%", b"\r 100%", b"\n"], [b" 0%", b" 50%", b" 100%"]),
        ([b" 0%\r", b" 50%\r", b" 100%\r\n"], [b" 0%", b" 50%", b" 100%"]),
        ([b"a\r\nb\r", b"\nc\n"], [b"a", b"b", b"c"]),
        ([GARBAGE + b"\n"], [GARBAGE]),
    ],
    ids=["parts", "progress bar", "progress bar of others", "both ends of a line", "no text"],
)
def test_lines_are_whole_whatever_comes_between_their_parts(log: Log, parts: list[bytes], lines: list[bytes]) -> None:
    log.output.write(log.zero, parts[0])
    log.output.write(log.one, b"hello\n")
    for part in parts[1:]:
        log.output.write(log.zero, part)
    written = log.text().replace(b"[worker 1] hello\n", b"", 1)
    assert written == b"".join(b"[worker 0] " + line + b"\n" for line in lines)


@pytest.mark.timeout(20)
def test_a_long_line_is_written_whole(tmp_path: Path) -> None:  # in time that grows with its length, not its square
    with (tmp_path / "log").open("wb") as file:
        written = Output(file.fileno(), file.fileno())
        stream = written.stream("worker 0", is_error=False)
        for _ in range(8):
            written.write(stream, bytes(1 << 16))
        written.write(stream, b"\n")
    assert (tmp_path / "log").read_bytes() == b"[worker 0] " + bytes(1 << 19) + b"\n"


def test_a_last_line_without_an_end_gets_one(log: Log) -> None:
    log.output.write(log.zero, b"last words")
    log.output.end(log.zero)
    log.output.end(log.zero)
    log.output.report("worker 0 left")
    assert log.text() == b"[worker 0] last words\ngangline: worker 0 left\n"


def test_a_line_without_end_does_not_fill_the_memory(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_LONGEST", 100)
    for _ in range(50):
        log.output.write(log.zero, b"x" * 30)
        assert len(log.zero.pending) <= 100
    log.output.end(log.zero)
    lines = log.text().splitlines()
    assert sum(line.count(b"x") for line in lines) == 1500
    assert all(line.startswith(b"[worker 0] x") for line in lines)


def test_a_pipe_in_place_of_a_log_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "worker-0.log")
    tmp_path.chmod(0o1777)
    with launch("-n", "1", "-s", "0", "--log-dir", str(tmp_path), "--", *PYTHON, "print('here')") as run:
        assert run.end() == (
            1,
            [],
            [
                f"gangline: the log {tmp_path}/worker-0.log cannot be written: a file that is not a regular one in a "
                "folder that other users may write is not opened; remove it"
            ],
        )


# On a full disk the job goes on, and the launcher says so


LINES = 20_000
CODE = f"for i in range({LINES}): print(i)\nprint('end')"


@needs_mount
@pytest.mark.timeout(60)
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


@needs_mount
@pytest.mark.timeout(60)
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
