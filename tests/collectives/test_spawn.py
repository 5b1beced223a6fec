"""spawn: arguments and results, errors that name the failed rank, and no leftovers whichever process dies."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from gangline import Communicator
from gangline.collectives.errors import DeadNodeError, StallError
from gangline.collectives.processes.spawning import Ranks, spawn
from tests.collectives.processes import Bare, bare_ranks, outcomes_of, results_of
from tests.collectives.ranks import open_files, run_together

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def server() -> int:
    """Start the fork server and return its process id."""
    return int(results_of(_server, 1)[0])


@pytest.fixture(autouse=True)
def _nothing_stays(server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that a test leaves no rank, no open file and no temporary file."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    files = open_files()
    yield
    assert open_files() == files
    assert _children(server) == []
    assert list(temporary.iterdir()) == []


def _server(comm: Bare) -> int:
    return os.getppid()


def _children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children()


# Arguments and results


def test_results_outlive_their_ranks_and_keep_shared_storage() -> None:
    first, second = results_of(_tensors, 2)
    whole, part, array = second
    whole[2] = 50.0
    assert part.tolist() == [1.0, 50.0, 3.0]  # a view is a view
    assert array.tolist() == [[2, 3], [4, 5]]
    assert first[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def _tensors(comm: Bare) -> tuple[torch.Tensor, torch.Tensor, np.ndarray[Any, Any]]:
    whole = torch.arange(5.0)
    return whole, whole[1:4], np.arange(4).reshape(2, 2) + 2 * comm.rank


def _overwrite(comm: Bare, values: torch.Tensor, options: dict[str, int]) -> torch.Tensor:
    return values.mul_(options["by"] * comm.rank)


def test_ranks_have_the_environment_directory_and_threads_of_the_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GANGLINE_SAID", "now")
    monkeypatch.delenv("HOME")
    assert results_of(_surroundings, 2, threads=3) == [("now", None, str(tmp_path), 3)] * 2


def _surroundings(comm: Bare) -> tuple[str | None, str | None, str, int]:
    return os.environ.get("GANGLINE_SAID"), os.environ.get("HOME"), os.getcwd(), torch.get_num_threads()


def test_cores_are_divided_and_random_numbers_of_numpy_differ() -> None:
    cores = len(os.sched_getaffinity(0))
    for nprocs in (1, cores + 1):
        threads, numbers = zip(*results_of(_threads_and_number, nprocs), strict=True)
        assert threads == (max(1, cores // nprocs),) * nprocs  # at least one each
        assert len(set(numbers)) == nprocs


def _threads_and_number(comm: Bare) -> tuple[int, float]:
    return torch.get_num_threads(), float(np.random.random())


def test_ranks_print_to_the_callers_output(capfd: pytest.CaptureFixture[str]) -> None:
    results_of(_speak, 2)
    out, err = capfd.readouterr()
    assert sorted(out.split("\n")) == ["", "rank 0 says", "rank 1 says"]
    assert sorted(err.split("\n")) == ["", "rank 0 warns", "rank 1 warns"]


def _speak(comm: Bare) -> None:
    os.write(1, f"rank {comm.rank} says\n".encode())
    sys.stderr.write(f"rank {comm.rank} warns\n")  # one write; print() writes the newline separately


# Errors of the call


def test_one_server_serves_concurrent_callers() -> None:
    results: dict[int, list[int]] = {}

    def call(number: int) -> None:
        results[number] = results_of(_number_and_server, 2, (number,))

    run_together(partial(call, number) for number in range(3))
    servers = {server for result in results.values() for _, server in result}
    assert len(servers) == 1
    for number in range(3):
        assert [value for value, _ in results[number]] == [10 * number, 10 * number + 1]


def _number_and_server(comm: Bare, number: int) -> tuple[int, int]:
    return 10 * number + comm.rank, os.getppid()


@pytest.mark.parametrize(("nprocs", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)])
def test_an_invalid_number_of_ranks_is_refused(nprocs: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"nprocs is {nprocs}; expected"):
        spawn(_server, nprocs)


def test_a_function_that_ranks_cannot_import_is_refused() -> None:
    def local(comm: Communicator) -> None: ...

    for function in (local, lambda comm: None):
        with pytest.raises(
            ValueError, match=r"the ranks cannot import <function .*; spawn needs a function .* top level"
        ):
            spawn(function, 2)
    with pytest.raises(TypeError, match="spawn got 3; expected a function"):
        spawn(3, 2)


@pytest.mark.slow
def test_a_program_from_standard_input_runs_functions_of_modules_and_refuses_its_own() -> None:
    program = """
import operator
from gangline import spawn

def typed(comm): pass

print(spawn(operator.attrgetter("rank"), 2))
try:
    spawn(typed, 2)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ranks, refused = done.stdout.splitlines()
    assert ranks == "[0, 1]"
    assert refused.endswith("this program is not a file; define it in a module")


def test_an_argument_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(ValueError, match="argument 2 of spawn, of type lock, cannot be pickled"):
        spawn(_overwrite, 2, 1, threading.Lock())


@pytest.fixture
def main_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], ModuleType]:
    """Return a function that makes a script with a function ``work`` the main module."""

    def make(text: str) -> ModuleType:
        script = tmp_path / "script.py"
        script.write_text(text)
        main = ModuleType("__main__")
        main.__file__ = str(script)
        exec("def work(comm): pass", main.__dict__)
        monkeypatch.setitem(sys.modules, "__main__", main)
        return main

    return make


def test_a_script_without_a_main_guard_is_an_error(main_of: Callable[[str], ModuleType]) -> None:
    imports = "from gangline.collectives.processes.spawning import spawn\n"
    main = main_of(f"{imports}def work(comm): pass\nspawn(work, 2)\n")
    with pytest.raises(RuntimeError, match='call it under `if __name__ == "__main__":`'):
        spawn(main.work, 2)


def test_a_function_of_a_script_is_found_in_it(main_of: Callable[[str], ModuleType]) -> None:
    function = "def work(comm): return __name__, comm.rank\n"
    main = main_of(f"{function}if __name__ == '__main__': raise SystemExit(1)\n")
    assert results_of(main.work, 2) == [("__mp_main__", 0), ("__mp_main__", 1)]


# Failures of ranks


class OwnError(KeyError):
    """Exception of a class that the caller may not know."""


def _fail(comm: Bare, who: int, error: BaseException) -> None:
    if comm.rank == who:
        raise error
    comm.exchange(b"")  # which the failed rank never calls


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError("count is 3", 3), ValueError("count is 3", 3)),
        (StallError("rank 1 did not come"), StallError("rank 1 did not come")),
        (OwnError("fc.bias"), KeyError(f"{OwnError.__module__}.OwnError: 'fc.bias'")),
        (FileNotFoundError(2, "No such file", "a.txt"), FileNotFoundError(2, "No such file", "a.txt")),
        (
            ExceptionGroup("two", [ValueError("a"), TypeError("b")]),
            RuntimeError("ExceptionGroup: two (2 sub-exceptions)"),
        ),
        (KeyboardInterrupt(), RuntimeError("builtins.KeyboardInterrupt: ")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_of_a_rank_is_raised_with_its_rank_and_traceback(
    raised: BaseException, expected: Exception
) -> None:
    raised.add_note("while at fc.weight")
    with pytest.raises(type(expected)) as caught:
        results_of(_fail, 3, (1, raised))
    assert type(caught.value) is type(expected)
    assert (caught.value.args, str(caught.value)) == (expected.args, str(expected))
    kept, note = caught.value.__notes__[:2]
    assert kept == "while at fc.weight"
    assert note.startswith("raised by rank 1 of 3:\n")
    assert "Traceback" in note
    assert "raise error\n" in note


def test_consequences_that_are_reported_first_wait_for_the_cause() -> None:
    with pytest.raises(DeadNodeError) as caught:
        results_of(_follow, 3)
    assert str(caught.value) == "rank 2 of 3 was killed by SIGKILL"
    assert "rank 0 failed too: DeadNodeError: rank 2 left, says rank 0" in caught.value.__notes__


def _follow(comm: Bare) -> None:
    """Ranks 0 and 1 report that they lost rank 2, which dies only after both have."""
    if comm.rank < 2:
        comm.exchange(b"")
        raise DeadNodeError(f"rank 2 left, says rank {comm.rank}")
    comm.exchange(b"")
    server = os.getppid()
    while len(_children(server)) > 1:
        os.sched_yield()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", "rank 1 of 2 was killed by SIGKILL"),
        ("exit", "rank 1 of 2 exited with code 3 and without a result"),
        ("leave", "rank 1 of 2 exited with code 0 and without a result"),
    ],
)
def test_a_rank_that_ends_without_a_result_is_named_with_its_exit_code_or_signal(how: str, said: str) -> None:
    with pytest.raises(DeadNodeError) as caught:
        results_of(_end, 2, (how,))
    assert str(caught.value) == said


def _end(comm: Bare, how: str) -> None:
    if comm.rank == 1:
        if how == "exit":
            sys.exit(3)
        if how == "leave":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.exchange(b"")


def test_outcomes_has_an_entry_for_each_rank() -> None:
    outcomes = outcomes_of(_end, 3, ("kill",))
    errors = [str(outcome.error) for outcome in outcomes]
    assert errors[1] == "rank 1 of 3 was killed by SIGKILL"
    assert errors[0] == errors[2] == "rank 1 of 3 died before all had joined at the bootstrap exchange"
    assert [isinstance(outcome.error, DeadNodeError) for outcome in outcomes] == [True] * 3


def test_a_rank_that_misses_the_bootstrap_exchange_is_a_stall_error() -> None:
    with Ranks(_one_stays_away, 2, opener=Bare, timeout=0.3) as ranks, pytest.raises(StallError) as caught:
        ranks.results()
    assert str(caught.value) == "rank 1 of 2 did not reach the bootstrap exchange within 0.3 s"


def _one_stays_away(comm: Bare) -> None:
    if comm.rank == 1:
        signal.pause()
    comm.exchange(b"")


# Leftovers


def test_ctrl_c_ends_the_ranks() -> None:
    with bare_ranks(_interrupt, 2, (os.getpid(),)) as ranks, pytest.raises(KeyboardInterrupt):
        ranks.results()
    pids = ranks.pids
    assert all(_is_dead(pid) for pid in pids)


def _interrupt(comm: Bare, caller: int) -> None:
    os.kill(os.getpid(), signal.SIGINT)  # the terminal sends it to ranks too, which ignore it
    comm.exchange(b"")
    if comm.rank == 0:
        os.kill(caller, signal.SIGINT)
    signal.pause()


def test_closing_ends_ranks_that_compute_or_are_stopped() -> None:
    with bare_ranks(_compute_or_stop, 2) as ranks:
        pids = ranks.pids
        _wait_until_stopped(pids[1])
    assert all(_is_dead(pid) for pid in pids)


def _compute_or_stop(comm: Bare) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        pass


def _wait_until_stopped(pid: int) -> None:
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        os.sched_yield()


def _is_dead(pid: int) -> bool:
    """Return whether a process is dead; a zombie that init has not reaped counts."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


PROGRAM = """
import json, os, signal, sys
from gangline.collectives.processes import process_pool
from gangline.collectives.processes.process_pool import ProcessPool

process_pool.PRELOAD = ()


def busy_or_stopped(connection):
    connection.send(os.getppid())
    index, server = connection.recv()
    if index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if index == 2 and server == "dies":
        os.kill(os.getppid(), signal.SIGKILL)
    while True:
        pass


def main(server):
    with ProcessPool(busy_or_stopped, 3) as ranks:
        server_pid = {connection.recv() for connection in ranks.connections}
        print(json.dumps([*ranks.pids, *server_pid]), flush=True)
        for index, connection in enumerate(ranks.connections):
            connection.send((index, server))
        if server == "lives":
            sys.stdin.read()
        ended = {}
        while len(ended) < 3:
            ended.update(ranks.wait()[1])
        print(json.dumps(ended), flush=True)
    with ProcessPool(answer, 1) as ranks:
        print(ranks.connections[0].recv(), flush=True)


def answer(connection):
    connection.send("another server")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def _run(folder: Path, server: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"import program; program.main({server!r})"]
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)


def test_ranks_and_server_die_with_a_program_that_is_killed(program: Path) -> None:
    with _run(program, "lives") as process:
        pids = json.loads(process.stdout.readline())
        _wait_until_stopped(pids[1])
        deaths = [os.pidfd_open(pid) for pid in pids]
        process.kill()
        left = set(deaths)
        while left:
            over, _, _ = select.select(left, [], [], 10)
            assert over, "ranks outlive their program"
            left -= set(over)
        for death in deaths:
            os.close(death)
    assert len(pids) == 4  # three ranks and the server


def test_ranks_die_with_the_server_and_the_next_ones_get_another(program: Path) -> None:
    with _run(program, "dies") as process:
        out, _ = process.communicate()
    pids, ended, answer = out.splitlines()
    assert json.loads(ended) == {"0": None, "1": None, "2": None}
    assert answer == "another server"
    assert all(_is_dead(pid) for pid in json.loads(pids))
    assert process.returncode == 0
