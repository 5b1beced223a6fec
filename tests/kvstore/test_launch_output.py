"""Tests of the merged output of many processes, in a pipe and on a terminal."""

from __future__ import annotations

import os
import pty
import select
from collections.abc import Iterator

import pytest

from gangline.kvstore.launch import output
from gangline.kvstore.launch.output import Output


class Screen:
    """An `Output` and the reading end of its file."""

    def __init__(self, read: int, write: int, errors: int | None = None) -> None:
        self._read = read
        self.output = Output(write, write if errors is None else errors)
        self.zero = self.output.stream("worker 0", 0, is_error=False)
        self.one = self.output.stream("worker 1", 1, is_error=True)

    def text(self) -> bytes:
        """Return what was written since the last call."""
        found = b""
        while select.select([self._read], [], [], 0)[0]:
            found += os.read(self._read, 1 << 16)
        return found


@pytest.fixture(autouse=True)
def _show_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_PARTIAL_DELAY", 0.0)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def log() -> Iterator[Screen]:
    read, write = os.pipe()
    yield Screen(read, write)
    os.close(read)
    os.close(write)


@pytest.fixture
def terminal() -> Iterator[Screen]:
    read, write = pty.openpty()
    yield Screen(read, write)
    os.close(read)
    os.close(write)


def test_the_beginning_of_a_line_shows_before_its_end(log: Screen) -> None:
    log.output.write(log.zero, b"go on? ")
    assert log.text() == b""
    assert log.output.seconds_left() == 0.0
    log.output.show_beginnings()
    assert log.text() == b"[worker 0] go on? "
    assert log.output.seconds_left() is None
    log.output.write(log.zero, b"yes\nand ")
    log.output.show_beginnings()
    log.output.write(log.zero, b"so")
    log.output.show_beginnings()
    assert log.text() == b"yes\n[worker 0] and so"
    log.output.close()
    assert log.text() == b"\n"


def test_in_a_log_another_line_breaks_an_incomplete_one(log: Screen) -> None:
    log.output.write(log.zero, b"loading")
    log.output.show_beginnings()
    log.output.write(log.one, b"hello\n")
    assert log.text() == b"[worker 0] loading\n[worker 1] hello\n"
    log.output.write(log.zero, b" done\n")
    assert log.text() == b"[worker 0]  done\n"


def test_a_broken_line_without_a_rest_leaves_no_empty_line(log: Screen) -> None:
    log.output.write(log.zero, b"loading")
    log.output.show_beginnings()
    log.output.write(log.one, b"hello\n")
    log.output.write(log.zero, b"\n\nnext\n")
    assert log.text() == b"[worker 0] loading\n[worker 1] hello\n[worker 0] \n[worker 0] next\n"


@pytest.mark.parametrize("bar", [[b"\r 0%", b"\r 50%", b"\r 100%", b"\n"], [b" 0%\r", b" 50%\r", b" 100%\r\n"]])
def test_each_state_of_a_progress_bar_is_a_line_of_a_log(log: Screen, bar: list[bytes]) -> None:
    for state in bar:
        log.output.write(log.zero, state)
        log.output.show_beginnings()
    assert log.text() == b"[worker 0]  0%\n[worker 0]  50%\n[worker 0]  100%\n"


def test_carriage_return_and_newline_end_one_line_together(log: Screen) -> None:
    log.output.write(log.zero, b"a\r\nb\r")
    log.output.write(log.zero, b"\nc\n")
    assert log.text() == b"[worker 0] a\n[worker 0] b\n[worker 0] c\n"


def test_bytes_that_are_no_text_pass(log: Screen) -> None:
    garbage = bytes(byte for byte in range(256) if byte not in b"\r\n")
    log.output.write(log.zero, garbage + b"\n")
    assert log.text() == b"[worker 0] " + garbage + b"\n"


def test_a_last_line_without_an_end_gets_one(log: Screen) -> None:
    log.output.write(log.zero, b"last words")
    log.output.end(log.zero)
    log.output.end(log.zero)
    log.output.report("worker 0 left")
    assert log.text() == b"[worker 0] last words\ngangline: worker 0 left\n"


def test_a_line_without_end_does_not_fill_the_memory(log: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_LONGEST", 100)
    for _ in range(50):
        log.output.write(log.zero, b"x" * 30)
        assert len(log.zero.pending) <= 100
    log.output.end(log.zero)
    lines = log.text().splitlines()
    assert sum(line.count(b"x") for line in lines) == 1500
    assert all(line.startswith(b"[worker 0] x") for line in lines)


def test_standard_error_is_kept_apart() -> None:
    (read, write), (read_errors, write_errors) = os.pipe(), os.pipe()
    screen = Screen(read, write, write_errors)
    screen.output.write(screen.zero, b"begun")
    screen.output.show_beginnings()
    screen.output.write(screen.one, b"trouble\n")
    screen.output.write(screen.zero, b" and done\n")
    assert screen.text() == b"[worker 0] begun and done\n"
    assert os.read(read_errors, 100) == b"[worker 1] trouble\n"
    for fd in (read, write, read_errors, write_errors):
        os.close(fd)


ZERO, ONE, ERASE = b"\x1b[36m[worker 0]\x1b[0m ", b"\x1b[33m[worker 1]\x1b[0m ", b"\r\x1b[K"


def test_a_terminal_has_colours_unless_they_are_unwanted(terminal: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.output.write(terminal.zero, b"a\n")
    terminal.output.write(terminal.one, b"b\n")
    assert terminal.text() == ZERO + b"a\r\n" + ONE + b"b\r\n"
    monkeypatch.setenv("NO_COLOR", "1")
    read, write = pty.openpty()
    plain = Screen(read, write)
    plain.output.write(plain.zero, b"a\n")
    assert plain.text() == b"[worker 0] a\r\n"
    os.close(read)
    os.close(write)


def test_a_bar_on_a_terminal_stays_in_its_row_and_gives_way_to_lines(terminal: Screen) -> None:
    terminal.output.write(terminal.zero, b"\r 1%\r 2%")
    assert terminal.text() == ZERO + b" 1%"
    terminal.output.show_beginnings()
    assert terminal.text() == ERASE + ZERO + b" 2%"
    terminal.output.write(terminal.one, b"hello\n")
    assert terminal.text() == ERASE + ONE + b"hello\r\n"
    terminal.output.write(terminal.zero, b"\r 3%")
    terminal.output.show_beginnings()
    assert terminal.text() == ZERO + b" 2%" + ERASE + ZERO + b" 3%"
    terminal.output.close()
    assert terminal.text() == b"\r\n"


def test_a_line_on_a_terminal_is_never_cut_in_two(terminal: Screen) -> None:
    terminal.output.write(terminal.zero, b"loading")
    terminal.output.show_beginnings()
    terminal.output.write(terminal.one, b"hello\n")
    terminal.output.write(terminal.zero, b" done\n")
    assert terminal.text() == ZERO + b"loading" + ERASE + ONE + b"hello\r\n" + ZERO + b"loading done\r\n"
