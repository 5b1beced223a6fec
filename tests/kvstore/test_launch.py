"""Tests of `gangline launch` with real processes: output, exit codes, no process left behind."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gangline.cli.main import app

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
PYTHON = (sys.executable, "-S", "-E", "-c")
MARK = "GANGLINE_TEST_JOB"


def marked(mark: str) -> set[int]:
    """Return the running processes that have the variable with this value."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found


class Launch:
    """A launcher in its own process; all descendants inherit a variable by which they are found."""

    def __init__(self, command: Sequence[str], **options: object) -> None:
        self.mark = uuid.uuid4().hex
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        environment = {**os.environ, MARK: self.mark}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        self._heard = b""

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.running():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def running(self) -> set[int]:
        """Return the running processes among the launcher and its descendants."""
        return marked(self.mark)

    def hear(self, *expected: str) -> str:
        """Read standard output until it holds each of these texts."""
        while not all(text.encode() in self._heard for text in expected):
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, f"the launcher ended with {self._heard!r} and {self.process.stderr.read()!r}"
            self._heard += data
        return self._heard.decode()

    def end(self, timeout: float = 30) -> tuple[int, list[str], list[str]]:
        """Return exit code and lines of standard output and error; check that no process is left."""
        out, errors = self.process.communicate(timeout=timeout)
        assert self.running() == set()
        return self.process.returncode, (self._heard + (out or b"")).decode().splitlines(), errors.decode().splitlines()


def launch(*arguments: str, **options: object) -> Launch:
    return Launch([sys.executable, "-m", "gangline", "launch", *arguments], cwd=ROOT, **options)


def workers(code: str, count: int = 2, **options: object) -> Launch:
    """Launch workers without servers that run ``code`` with their rank as ``rank``."""
    head = "import os, signal, sys, time; rank = int(os.environ['RANK'])\n"
    return launch("-n", str(count), "-s", "0", "--", *PYTHON, head + code, **options)


def job(processes: dict[str, str], servers: float = 20, stop: float = 20, **options: object) -> Launch:
    """Launch shell commands as scheduler, servers and workers, with time limits in seconds."""
    code = (
        "import json, sys\n"
        "from gangline.launcher.job import Process\n"
        "from gangline.launcher.local import run\n"
        "from gangline.launcher.supervisor import StopTimeouts\n"
        "processes, servers, stop = json.loads(sys.argv[1])\n"
        "labels = [(label.partition(' '), command) for label, command in processes.items()]\n"
        "table = [Process(role, int(rank) if rank else None, ('sh', '-c', command), {})\n"
        "         for (role, _, rank), command in labels]\n"
        "sys.exit(run(table, StopTimeouts(servers, stop)).code)\n"
    )
    return Launch([sys.executable, "-c", code, json.dumps([processes, servers, stop])], cwd=ROOT, **options)


READY = "print('ready', flush=True)\nwhile True: signal.pause()\n"
DAEMON = (
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    between = os.getpid()\n"
    "    if os.fork() == 0:\n"
    "        while os.getppid() == between: time.sleep(0.001)\n"  # it has ended, so the daemon is the only one
    "        print('daemon', flush=True); signal.pause()\n"
    "    os._exit(0)\n"
)


# What the processes get


def test_every_worker_gets_its_rank() -> None:
    code = "import json; assert sys.stdin.read() == ''; print(json.dumps(dict(os.environ)))"
    with workers(code, stdin=None) as run:
        code_, out, errors = run.end()
    assert (code_, errors, len(out)) == (0, [], 2)
    found = [json.loads(line.partition("] ")[2]) for line in sorted(out)]
    for rank, own in enumerate(found):
        names = ("DMLC_ROLE", "DMLC_WORKER_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE")
        assert [own[name] for name in names] == ["worker", str(rank), str(rank), str(rank), "2"]
        assert all(own[name] == found[0][name] for name in ("DMLC_PS_ROOT_PORT", "MASTER_PORT"))
    assert found[0]["DMLC_PS_ROOT_PORT"] != found[0]["MASTER_PORT"]


# Output


def test_lines_of_all_processes_come_out_whole_and_in_order() -> None:
    code = (
        "for i in range(1000):\n"
        "    for word in (f'{i} ', 'x' * (i % 90), '\\n'): os.write(1, word.encode())\n"
        "    if i % 10 == 0: os.write(2, b'%d\\n' % i)\n"
    )
    with workers(code, 3) as run:
        code_, out, errors = run.end()
    assert code_ == 0
    for lines, expected in ((out, [f"{i} {'x' * (i % 90)}" for i in range(1000)]), (errors, range(0, 1000, 10))):
        for rank in range(3):
            head = f"[worker {rank}] "
            assert [line.removeprefix(head) for line in lines if line.startswith(head)] == [*map(str, expected)]
        assert len(lines) == 3 * len(expected)


# Failures


def test_the_first_failure_is_named_after_its_output_and_the_others_are_stopped() -> None:
    code = (
        "import fcntl\n"
        "if rank == 1:\n"
        "    fcntl.fcntl(2, fcntl.F_SETPIPE_SZ, 1 << 20)\n"  # so that all of it is in the pipe when the worker ends
        "    print(os.getpid(), flush=True); os.write(2, b'alas\\n' * 100_000); sys.exit(3)\n"
    )
    with workers(code + READY, 3) as run:
        code_, out, errors = run.end()
    (pid,) = (line.split()[-1] for line in out if line.startswith("[worker 1]"))
    assert code_ == 3
    assert errors == [
        *["[worker 1] alas"] * 100_000,
        f"gangline: worker 1 (pid {pid}) exited with code 3; stopping the other processes",
    ]


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [("none", 127, "No such file"), pytest.param("", 126, "Permission denied", marks=pytest.mark.slow)],
)
def test_a_command_that_cannot_be_run_gives_the_codes_of_a_shell(
    tmp_path: Path, name: str, code: int, reason: str
) -> None:
    command = tmp_path / name
    with launch("-n", "2", "-s", "0", "--", str(command)) as run:
        code_, _, errors = run.end()
    assert code_ == code
    assert errors[0].startswith(f"gangline: worker 0 cannot be started: '{command}': {reason}")
    assert len(errors) == 1


def test_a_process_that_ignores_sigterm_is_killed_after_the_timeout(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    stubborn = f"trap '' TERM; echo > {fifo}; while :; do sleep 100; done"
    with job({"worker 0": stubborn, "worker 1": f"read x < {fifo}; exit 5"}, stop=0.3) as run:
        code, _, errors = run.end()
    assert code == 5
    assert re.match(r"gangline: worker 1 \(pid \d+\) exited with code 5", errors[0])
    assert re.fullmatch(r"gangline: worker 0 \(pid \d+\) did not end within 0.3 s of SIGTERM: killed", errors[1])


# Servers and scheduler


def test_servers_have_time_to_end_by_themselves_after_the_last_worker(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    until_worker_left = f"cat {fifo}; sleep 0.2; echo ended"
    with job({"scheduler": "exit 0", "server 0": until_worker_left, "worker 0": f"exec 3> {fifo}"}) as run:
        assert run.end() == (0, ["[server 0] ended"], [])


@pytest.mark.parametrize(
    ("scheduler", "server", "worker", "code", "words"),
    [
        ("exit 0", "exec sleep 100", "exit 0", 0, "all workers succeeded, but server 0 did not end within 0.3 s after"),
        ("exec sleep 100", "sleep 0.1; exit 7", "exec sleep 100", 7, "server 0 exited with code 7"),
        ("exec sleep 100", "exec sleep 100", "kill -SEGV $$", 128 + signal.SIGSEGV, "worker 0 was killed by SIGSEGV"),
    ],
    ids=["server does not end", "server fails", "worker is killed"],
)
def test_a_job_ends_with_the_code_of_its_failure_and_names_the_process(
    scheduler: str, server: str, worker: str, code: int, words: str
) -> None:
    with job({"scheduler": scheduler, "server 0": server, "worker 0": worker}, servers=0.3) as run:
        code_, _, errors = run.end()
    assert code_ == code
    assert re.sub(r" \(pid \d+\)", "", errors[0]).startswith(f"gangline: {words}"), errors


@pytest.mark.slow
def test_a_worker_that_has_left_the_job_is_the_first_to_fail_though_its_process_ends_last(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    processes = {
        "scheduler": f"echo 'worker 1' > /proc/self/fd/$GANGLINE_LAUNCHER_FD; echo > {fifo}; exec sleep 100",
        "worker 0": f"read x < {fifo}; exit 1",
        "worker 1": "sleep 1; exit 7",
    }
    with job(processes) as run:
        code, _, errors = run.end()
    assert code == 7
    assert re.match(r"gangline: worker 1 \(pid \d+\) exited with code 7", errors[0])
    with job(processes | {"worker 1": "exec sleep 100"}) as run:  # it does not end
        code, _, errors = run.end()
    assert code == 1
    assert re.match(r"gangline: worker 0 \(pid \d+\) exited with code 1", errors[0])


def test_servers_outlive_the_workers_that_a_failure_stops(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def until_stopped(then: str) -> str:
        return f"trap '{then}; exit 0' TERM; sleep 100 & echo ready > {fifo}; wait"

    fails = f"exec 4<> {fifo}; read x <&4; read x <&4; exit 5"
    processes = {"scheduler": "echo last", "worker 0": "sleep 0.3; echo first"}
    with job({name: until_stopped(then) for name, then in processes.items()} | {"worker 1": fails}) as run:
        code, out, errors = run.end()
    assert (code, out) == (5, ["[worker 0] first", "[scheduler] last"])
    assert re.match(r"gangline: worker 1 \(pid \d+\) exited with code 5", errors[0])


# Nothing is left


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_to_the_launcher_ends_everything(number: signal.Signals) -> None:
    def heed() -> None:
        signal.signal(number, signal.SIG_DFL)  # these tests may run under nohup

    with workers(DAEMON + READY, preexec_fn=heed) as run:
        run.hear("[worker 0] ready", "[worker 1] ready", "[worker 0] daemon", "[worker 1] daemon")
        assert len(run.running()) == 6
        run.process.send_signal(number)
        code, _, errors = run.end()
    assert code == 128 + number
    assert errors == [f"gangline: {number.name}; stopping the other processes"]


def test_a_signal_goes_to_servers_when_the_workers_have_ended() -> None:
    wait = "echo {0} ready; while :; do sleep 0.05; done"
    server = f"trap 'echo told; exit 0' TERM; {wait.format('server')}"
    worker = f"trap 'sleep 0.3; echo ends; exit 0' TERM; {wait.format('worker')}"
    with job({"server 0": server, "worker 0": worker, "worker 1": worker}) as run:
        run.hear("[server 0] server ready", "[worker 0] worker ready", "[worker 1] worker ready")
        run.process.send_signal(signal.SIGTERM)
        code, out, _ = run.end()
    assert code == 128 + signal.SIGTERM
    assert sorted(out[3:5]) == ["[worker 0] ends", "[worker 1] ends"]
    assert out[5:] == ["[server 0] told"]


def test_ctrl_c_on_a_terminal_ends_everything() -> None:
    ours, theirs = pty.openpty()

    def lead_session() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    with workers(READY, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=lead_session) as run:
        os.close(theirs)
        heard = b""
        while heard.count(b"ready") < 2:
            heard += os.read(ours, 1 << 16)
        os.write(ours, b"\x03")
        assert run.process.wait(30) == 130
        assert run.running() == set()
    os.close(ours)


def test_a_signal_leaves_forked_workers_to_their_program_and_reaches_programs_of_a_shell() -> None:
    """The forked worker is there when the program gets the signal, and gets none itself."""
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "reading, writing = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL); os.read(reading, 1); os._exit(6)\n"
        "try:\n"
        "    print('ready', flush=True); signal.pause()\n"
        "finally:\n"
        "    os.write(writing, b'x'); print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
    )
    program = shlex.join([*PYTHON, f"import os, signal, sys\n{code}"])
    with launch("-n", "1", "-s", "0", "--", "sh", "-c", f"trap : TERM; {program}; exit $?") as run:
        run.hear("[worker 0] ready")
        run.process.terminate()
        assert run.end()[:2] == (75, ["[worker 0] ready", "[worker 0] 6"])


def test_a_worker_that_stops_because_another_was_told_to_is_told_in_time(tmp_path: Path) -> None:
    flag = str(tmp_path / "stopped")
    code = (
        "def stop(*_):\n"
        f"    open({flag!r}, 'w').close()\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, stop if rank == 0 else lambda *_: None)\n"
        "print('ready', flush=True)\n"
        f"while not os.path.exists({flag!r}): time.sleep(0.0005)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"  # as after the block of `stop_on`
        "time.sleep(0.5)\n"
        "sys.exit(75)"
    )
    with workers(code) as run:
        run.hear("[worker 0] ready", "[worker 1] ready")
        run.process.send_signal(signal.SIGTERM)
        assert run.end()[0] == 75


def test_a_second_signal_kills_at_once() -> None:
    stubborn = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print('ready', flush=True)\n"
        "signal.sigwait([signal.SIGTERM]); print('later', flush=True); signal.pause()\n"
    )
    with workers(stubborn) as run:
        run.hear("[worker 0] ready", "[worker 1] ready")
        run.process.send_signal(signal.SIGINT)
        run.hear("[worker 0] later", "[worker 1] later")
        run.process.send_signal(signal.SIGINT)
        code, _, errors = run.end()
    assert code == 130
    assert errors == ["gangline: SIGINT; stopping the other processes"]  # no timeout is reported


def test_a_killed_launcher_leaves_nothing() -> None:
    _kill_and_see_all_end(lambda run: run.process.pid)


def test_a_killed_supervisor_leaves_nothing_and_is_named() -> None:
    def supervisor(run: Launch) -> int:
        task = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children")
        (pid,) = task.read_text().split()
        return int(pid)

    code, errors = _kill_and_see_all_end(supervisor)
    assert code == 137
    assert errors == ["gangline: the launcher's supervisor was killed by signal 9: all processes are stopped"]


def _kill_and_see_all_end(victim: Callable[[Launch], int]) -> tuple[int, list[str]]:
    with workers(DAEMON + READY) as run:
        run.hear("[worker 0] ready", "[worker 1] ready", "[worker 0] daemon", "[worker 1] daemon")
        all_of_them = [os.pidfd_open(pid) for pid in run.running()]
        assert len(all_of_them) == 6
        os.kill(victim(run), signal.SIGKILL)
        until = time.monotonic() + 20
        for fd in all_of_them:
            assert select.select([fd], [], [], max(0.0, until - time.monotonic()))[0], "a process did not end"
            os.close(fd)
        code, _, errors = run.end()
        return code, errors


@pytest.mark.slow
def test_daemons_of_a_worker_are_stopped_after_success() -> None:
    with workers(DAEMON + "sys.exit(0)") as run:
        code, _, errors = run.end()
    assert (code, errors) == (0, [])


def test_the_job_ends_when_the_reader_of_its_output_is_gone() -> None:
    with workers("while True: print('more', flush=True)") as run:
        run.hear("more")
        run.process.stdout.close()
        run.process.stdout = None
        code, _, errors = run.end()
    assert code == 128 + signal.SIGPIPE
    assert errors[0] == "gangline: output cannot be written: Broken pipe; stopping the other processes"


def test_a_reader_that_does_not_read_cannot_block_a_stop() -> None:
    with job({"worker 0": "exec yes"}, stop=0.2) as run:
        pipe = run.process.stdout.fileno()
        run.hear("y")
        _wait_until_full(pipe)
        run.process.terminate()
        assert run.process.wait(30) == 143
        assert run.running() == set()


def _wait_until_full(pipe: int) -> None:
    """Wait until a pipe is full, to the page."""
    capacity = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    until = time.monotonic() + 20
    waiting = bytearray(4)
    while int.from_bytes(waiting, sys.byteorder) <= capacity - 2 * select.PIPE_BUF:
        assert time.monotonic() < until
        fcntl.ioctl(pipe, termios.FIONREAD, waiting)


@pytest.mark.slow
def test_under_nohup_a_hangup_is_ignored() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with workers(READY, preexec_fn=ignore) as run:
        run.hear("[worker 0] ready", "[worker 1] ready")
        run.process.send_signal(signal.SIGHUP)
        run.process.send_signal(signal.SIGTERM)
        assert run.end()[0] == 143


# The command


def test_dry_run_prints_lines_for_a_shell_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEXT", 'it\'s "this" $HOME')
    file = tmp_path / "a file"
    command = ["sh", "-c", f"echo \"$RANK of $WORLD_SIZE, $TEXT, $GANGLINE_WORK_LOAD_LIST\" >> '{file}'"]
    arguments = ["-n", "2", "--env", "TEXT", "--work-load-list", "3,0.5", "--dry-run", *command]
    done = CliRunner().invoke(app, ["launch", *arguments])
    lines = done.output.splitlines()
    assert (done.exit_code, len(lines)) == (0, 4)
    for role, line in zip(("scheduler", "server"), lines, strict=False):
        assert f"-m gangline.kvstore.parameter_server.{role}" in line
    assert not file.exists()
    for line in lines[2:]:
        subprocess.run(line, shell=True, check=True)
    assert file.read_text().splitlines() == [f'{rank} of 2, it\'s "this" $HOME, 3,0.5' for rank in range(2)]


# The arguments before "-- true", and what the error says.
WRONG_USAGE = {
    "-n 0": "--workers",
    "-n 2 --nosuch": "--nosuch",
    "-n 2 --launcher yarn": "'yarn' is not one of 'local'",
    "-n 2 --gpus 0,x": "--gpus is '0,x'; expected numbers with commas",
    "-n 2 --gpus 0,97": "97, which this machine does not have; the GPUs here: ",
    "-n 2 --work-load-list 3,1,1": "has 3 entries for 2 workers",
    "-n 2 --work-load-list 3,x": "'3,x'; expected numbers with commas, such as 3,1, or auto",
    "-n 2 --env NOT_SET_HERE": "NOT_SET_HERE is not set here",
    "-n 2 -s 0 --restart-processes 1": "--restart-processes needs servers",
    "-n 2 -s 0 --log-dir /proc/none": "--log-dir /proc/none cannot be created: No such file",
    "-n 2 --launcher mpi --max-restarts 1": "--max-restarts has no effect with --launcher mpi; expected --launcher ",
    "-n 2 --launcher slurm --max-restarts 1": "Slurm queues the job again",
    "-n 2 -s 2 --server-memory 8G": "--server-memory has 1 size for 2 servers (-s); expected one for each",
    "-n 2 -s 2 --server-memory 8G,x": "--server-memory is 'x'; expected bytes above 0, such as 8G, 512M or 1000000",
    "-n 2 --elastic 3:4": "-n is 2; expected 3 to 4 workers, by --elastic",
    "-n 2 --elastic 4": "--elastic is '4'; expected the least and the most workers, such as 1:4",
    "-n 2 -s 0 --elastic 1:4": "--elastic needs servers, -s 1 or more",
    "-n 2 --elastic 1:4 --work-load-list auto": "--work-load-list auto measures workers that stay",
    "-n 2 --elastic 1:4 --launcher mpi": "--elastic has no effect with --launcher mpi; expected --launcher local",
}


@pytest.mark.parametrize(
    ("line", "words"),
    [("-n 2", "CMD"), ("-- true", "-n"), *((f"{line} -- true", words) for line, words in WRONG_USAGE.items())],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(
    line: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gangline.cli.main import main

    monkeypatch.setattr(sys, "argv", ["gangline", "launch", *line.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert words in " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().err).split())


def test_the_launcher_needs_no_torch() -> None:
    code = "import sys, gangline.cli.launch, gangline.launcher.local\nprint({'torch', 'numpy', 'zmq'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.slow
def test_options_after_the_command_are_its_own() -> None:
    with launch("-n", "1", "-s", "0", "echo", "--gpus", "x", "--", "-n") as run:
        assert run.end() == (0, ["[worker 0] --gpus x -- -n"], [])


HOSTS = """
import os, sys
from gangline.launcher.job import Process
from gangline.launcher.local import run
if os.getuid() == 0:  # which has no limit
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
count, size = map(int, sys.argv[1:])
line = "x" * size
sys.exit(run([Process("host", rank, ("sh", "-c", "sleep 1; head -n 1 | wc -c >&2"), {}, document=line)
              for rank in range(count)]).code)
"""


@pytest.mark.parametrize(("hosts", "size"), [pytest.param(64, 9_000, marks=pytest.mark.slow), (2, 3 << 20)])
def test_an_ordinary_user_starts_many_hosts_and_long_descriptions(hosts: int, size: int) -> None:
    """A user's pipes may have 64 MiB together; those beyond have a page."""
    with Launch([sys.executable, "-c", HOSTS, str(hosts), str(size)], cwd=ROOT) as run:
        status, _, errors = run.end()
    assert status == 0, errors
    assert [int(line) for line in errors if line.strip().isdecimal()] == [size + 1] * hosts
