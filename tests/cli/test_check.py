"""`gangline check` on this machine: healthy, and with what makes jobs fail or slow really done to it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gangline.cli.main import app
from gangline.usage_error import UsageError
from tests.collectives.firewall import drop_tcp
from tests.hosts import Hosts, obstacle

CHECK = (sys.executable, "-m", "gangline", "check")
QUICK = ("dev-shm", "tmpdir", "cross-memory-attach", "limits", "host-name", "ports", "clock")
MOUNTS = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mount namespaces need root and the command unshare"
)
HOSTS = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

FORBID = f"""
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 310), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))

class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_void_p)]

assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.byref(Filter(len(rules), ctypes.addressof(program)))) == 0  # PR_SET_SECCOMP
os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""
"""Program that runs Python without process_vm_readv(2): a seccomp filter answers EPERM, as that of Docker does."""


def started(*command: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run a command with `--json -`; return its exit code and the findings by name."""
    done = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, {one["name"]: one for one in json.loads(done.stdout)["findings"]}


def only(*names: str) -> list[str]:
    return [*CHECK, *(word for name in names for word in ("--only", name))]


def mounted(*lines: str, command: list[str]) -> list[str]:
    """Return a command that runs another one where these mounts are made, which nobody else sees."""
    return ["unshare", "-m", "sh", "-ec", "\n".join([*lines, 'exec "$@"']), "sh", *command]


def test_a_healthy_machine_has_nothing_broken() -> None:
    code, found = started(*only(*QUICK, "job"))
    assert code == 0
    of_links = found.pop("links between hosts")  # outside a job
    assert of_links["status"] == "skipped"
    assert "gangline launch" in of_links["remedy"]
    assert set(found) == {
        "/dev/shm", "TMPDIR", "cross-memory attach", "memory", "open files", "threads", "locked memory", "host name",
        "ports", "clock",
    }  # fmt: skip
    assert found["cross-memory attach"]["status"] == "ok"
    assert "GB/s" in found["cross-memory attach"]["measured"]
    assert not [one for one in found.values() if one["status"] == "ok" and one["remedy"]]


@pytest.mark.slow
def test_all_checks_run_and_print_a_line_each() -> None:
    done = subprocess.run(CHECK, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("ok       shared memory", "ok       all-reduce of 2 ranks", "right by shared_memory: 8 B in "):
        assert words in done.stdout
    if not Path("/dev/nvidiactl").exists():
        assert "skipped  GPUs                   this machine has none" in done.stdout


@MOUNTS
@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("64k", (1, "broken", "cannot write 1.0 MiB: No space left on device, 64 KiB of 64 KiB free")),
        pytest.param("64m", (0, "warn", "64.0 MiB of 64.0 MiB free"), marks=pytest.mark.slow),  # as Docker has it
    ],
)
def test_a_full_or_small_dev_shm_is_named(size: str, expected: tuple[int, str, str]) -> None:
    code, found = started(*mounted(f"mount -t tmpfs -o size={size} none /dev/shm", command=only("dev-shm")))
    finding = found["/dev/shm"]
    assert (code, finding["status"], finding["measured"]) == expected
    assert "docker run --shm-size 8g" in finding["remedy"]


@pytest.mark.parametrize(("length", "status"), [pytest.param(75, "ok", marks=pytest.mark.slow), (76, "warn")])
def test_a_tmpdir_too_long_for_the_sockets_of_data_workers_is_named(
    length: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = Path(short, "d" * (length - len(short) - 1))
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder))
        code, found = started(*only("tmpdir"))
    finding = found["TMPDIR"]
    assert (code, finding["status"]) == (0, status)
    assert finding["measured"] == f"{folder} has {length} bytes; sockets in it allow 75"
    assert ("DataLoader" in finding["remedy"]) == (status == "warn")


@pytest.mark.slow
def test_shared_memory_that_exceeds_a_limit_is_slow() -> None:
    code, found = started("sh", "-c", 'ulimit -f 1000; exec "$@"', "sh", *only("shared-memory", "limits"))
    finding = found["shared memory"]
    assert (code, finding["status"]) == (0, "slow")
    assert finding["measured"].startswith("cannot offer memory: [Errno 27] File too large")
    assert "`ulimit -f unlimited`" in finding["remedy"]
    assert "ranks use sockets" in finding["remedy"]
    assert found["file size"]["status"] == "warn"
    assert found["memory"]["measured"].endswith(" free")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter has the system call's number on x86-64")
def test_forbidden_cross_memory_attach_is_slow() -> None:
    command = only("cross-memory-attach")[1:]
    code, found = started(sys.executable, "-c", FORBID, *command)
    finding = found["cross-memory attach"]
    assert (code, finding["status"]) == (0, "slow")
    assert finding["measured"].endswith("Operation not permitted")
    for words in ("kernel.yama.ptrace_scope", "SYS_PTRACE", "without it ranks copy large tensors once more"):
        assert words in finding["remedy"]


@pytest.mark.slow
def test_too_few_file_descriptors_are_broken() -> None:
    code, found = started("sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *only("limits"))
    finding = found["open files"]
    assert (code, finding["status"]) == (1, "broken")
    assert "ulimit -n is 64 of 64" in finding["measured"]
    assert "`ulimit -n 65536`" in finding["remedy"]


@MOUNTS
@HOSTS
def test_a_host_name_that_resolves_to_loopback_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    command = mounted(f"mount --bind {tmp_path}/hosts /etc/hosts", command=only("host-name"))
    with Hosts(1) as hosts:  # with a network, unlike some machines that run tests
        code, found = started("ip", "netns", "exec", hosts.names[0], *command)
    finding = found["host name"]
    assert (code, finding["status"]) == (0, "warn")
    assert finding["measured"] == f"{socket.gethostname()} resolves to 127.0.1.1, a loopback address"
    for words in ("/etc/hosts", "--interface", "GANGLINE_INTERFACE", "MASTER_ADDR"):
        assert words in finding["remedy"]


@pytest.mark.slow
@MOUNTS
def test_a_name_server_that_never_answers_ends_at_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.77\n")
    mounts = [f"mount --bind {tmp_path / name} /etc/{name}" for name in ("hosts", "resolv.conf")]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.77", 53))
        code, found = started(*mounted(*mounts, command=[*only("host-name"), "--timeout", "1"]))
    finding = found["host-name"]
    assert (code, finding["status"], finding["measured"]) == (1, "broken", "did not end within 1 s")
    assert "/etc/resolv.conf" in finding["remedy"]


@pytest.mark.slow
@HOSTS
def test_loopback_that_is_down_is_broken() -> None:
    with Hosts(1) as hosts:
        hosts.run(0, ["ip", "link", "set", "lo", "down"])
        code, found = started("ip", "netns", "exec", hosts.names[0], *only("ports"))
    assert (code, found["ports"]["status"]) == (1, "broken")
    assert "`ip link set lo up`" in found["ports"]["remedy"]


def test_wrong_usage_lists_the_checks() -> None:
    done = CliRunner().invoke(app, ["check", "--only", "shm"])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception).startswith("--only is 'shm'; expected one of shared-memory, dev-shm, ")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["gangline", "torchrun", "mpirun"])
def test_rank_0_prints_the_check_of_a_job(launcher: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the environment may not be on it
    if shutil.which(launcher, path=path) is None:
        pytest.skip(f"there is no {launcher}")
    check = ("-m", "gangline", "check", "--only", "job", "--only", "ports")
    command = {
        "gangline": [sys.executable, "-m", "gangline", "launch", "-n", "2", "-s", "0", "--", sys.executable, *check],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2", *check],
        "mpirun": ["mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none", sys.executable, *check],
    }[launcher]
    env = {**os.environ, "PATH": path, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 ranks on 1 host") == 1
    assert done.stdout.count("127.0.0.1 carries TCP") == 1  # once for the host
    assert done.stdout.count("right by shared_memory") == 1


@pytest.mark.slow
@HOSTS
def test_ranks_on_both_sides_of_a_firewall_exit_with_1() -> None:
    """The port of rank 0 is dropped, so the ranks do not join, and each prints what it has found."""
    with Hosts(2) as hosts:
        drop_tcp(hosts, 1)
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500", "GANGLINE_INSECURE": "1"}
        command = [*only("job", "ports"), "--timeout", "3"]
        processes = [hosts.start(rank, command, {**env, "RANK": str(rank)}) for rank in range(2)]
        outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert "StallError" in outputs[0]
    assert f"timed out: {hosts.addresses[0]}:29500" in outputs[1]
    assert all("allow TCP between the hosts" in output or "firewall" in output for output in outputs)
