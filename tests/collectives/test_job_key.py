"""Tests of job keys: their text, files and descriptors."""

from __future__ import annotations

import copy
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gangline.cli.main import main
from gangline.collectives.environments import job_key as module
from gangline.collectives.environments.job_key import JobKey, inherited_key, job_key, open_descriptor, write_file
from tests.programs import ROOT


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module.FILE, raising=False)
    monkeypatch.delenv(module.DESCRIPTOR, raising=False)
    monkeypatch.setattr(module._Inherited, "key", None)
    monkeypatch.setattr(module._Inherited, "problem", "")


def test_a_key_survives_its_digits_and_shows_them_nowhere_else() -> None:
    key = JobKey.new()
    assert JobKey.from_hex(f" {key.hex()}\n") == key != JobKey.new()
    assert len({key, JobKey.from_hex(key.hex())}) == 1
    for text in (repr(key), str(key), f"{key}", f"{[key]}", key.job_id()):
        assert not any(key.hex()[begin : begin + 8] in text for begin in range(56))
    for hide in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            hide(key)


def test_codes_depend_on_the_key_the_label_and_the_border_of_parts() -> None:
    key = JobKey.new()
    codes = {key.mac("a", b"bc"), key.mac("b", b"bc"), key.mac("a", b"b", b"c"), JobKey.new().mac("a", b"bc")}
    assert len(codes) == 4
    assert key.mac("a", b"bc") in codes


@pytest.mark.parametrize("text", ["", "00" * 31, "00" * 33, "0g" * 32, "secret" * 9])
def test_text_that_is_no_key_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"the file does not hold a job key.*64 hexadecimal digits") as caught:
        JobKey.from_hex(text, "the file")
    assert not text or text[:6] not in str(caught.value)
    assert caught.value.__context__ is None


def test_a_key_file_is_private_and_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert job_key() is None
    path, key = tmp_path / "key", JobKey.new()
    write_file(key, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_file(JobKey.new(), path)
    monkeypatch.setenv(module.FILE, str(path))
    assert job_key() == key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_file_that_others_can_use_is_refused(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    write_file(JobKey.new(), path)
    path.chmod(mode)
    monkeypatch.setenv(module.FILE, str(path))
    with pytest.raises(PermissionError, match=rf"GANGLINE_JOB_KEY_FILE has mode {mode:04o}.*chmod 600 {path}"):
        job_key()


def test_a_key_file_of_another_user_that_is_missing_or_no_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    monkeypatch.setenv(module.FILE, str(path))
    with pytest.raises(FileNotFoundError, match=r"key' of GANGLINE_JOB_KEY_FILE cannot be read: No such file"):
        job_key()
    path.touch(0o600)
    path.write_text("not a key, but a password\n")
    with pytest.raises(ValueError, match=r"key' of GANGLINE_JOB_KEY_FILE does not hold a job key") as caught:
        job_key()
    assert "password" not in str(caught.value)
    monkeypatch.setenv(module.FILE, str(tmp_path))
    with pytest.raises(OSError, match="GANGLINE_JOB_KEY_FILE cannot be read: Is a directory"):
        job_key()
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        monkeypatch.setenv(module.FILE, str(path))
        with pytest.raises(PermissionError, match="belongs to user 65534; a job key must belong to the user"):
            job_key()


def test_an_inherited_key_is_read_once_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    key = JobKey.new()
    descriptor = open_descriptor(key)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"0", 0)
    monkeypatch.setenv(module.DESCRIPTOR, str(descriptor))
    assert job_key() == key
    assert module.DESCRIPTOR not in os.environ
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert job_key() == key


def test_a_descriptor_that_was_closed_on_the_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "other").open("w+") as other:
        other.write(JobKey.new().hex())
        other.flush()
        monkeypatch.setenv(module.DESCRIPTOR, str(other.fileno()))
        for _ in range(2):
            with pytest.raises(
                ValueError, match=rf"descriptor '{other.fileno()}' of GANGLINE_JOB_KEY_FD does not hold"
            ):
                job_key()
        os.fstat(other.fileno())  # another file's descriptor stays open


_CHILD = """
import os, sys
from gangline.collectives.environments.job_key import JobKey, job_key
key = job_key()
print(key == JobKey.from_hex(sys.stdin.read()), key, "GANGLINE_JOB_KEY_FD" in os.environ, flush=True)
os.system("ls -l /proc/self/fd")  # a shell passes on what is inheritable
"""


def test_children_inherit_a_key_and_grandchildren_do_not() -> None:
    key = JobKey.new()
    with inherited_key(key) as (environment, descriptors):
        children = [
            subprocess.Popen(
                [sys.executable, "-c", _CHILD],
                env={**os.environ, **environment},
                pass_fds=descriptors,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)  # the same descriptor serves all
        ]
    for child in children:
        printed = child.communicate(key.hex())[0]
        assert printed.splitlines()[0] == "True JobKey(...) False"
        assert "memfd" not in printed
        assert child.returncode == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])


def test_the_command_writes_a_key_and_overwrites_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.key"
    monkeypatch.setattr(sys, "argv", ["gangline", "key", "new", str(path)])
    printed, before = [], ""
    for code in (0, 1):
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == code
        printed.append(capfd.readouterr())
        before = before or path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    JobKey.from_hex(before)
    (out, errors), (nothing, refused) = printed
    assert f"export GANGLINE_JOB_KEY_FILE={path}" in out
    assert before.strip() not in out + errors
    assert nothing == ""
    assert "job.key exists; name another file" in refused
    assert path.read_text() == before
