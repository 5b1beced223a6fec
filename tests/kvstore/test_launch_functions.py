"""`gangline.launch` with real processes: results, output, the first failure, and nothing left behind."""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import gangline
from gangline.collectives.errors import DeadNodeError, GanglineError, StallError
from tests.kvstore.parameter_server.processes import run_job
from tests.kvstore.test_launch import ROOT, Launch

pytestmark = pytest.mark.timeout(60)


def test_results_come_in_rank_order_and_output_with_its_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    def place(values: list[int]) -> tuple[str, str | None, list[int]]:
        print("here", flush=True)
        print("warned", file=sys.stderr, flush=True)
        return os.environ["GANGLINE_WORK_LOAD_LIST"], os.environ.get("OWN"), [*values, int(os.environ["RANK"])]

    found = gangline.launch(place, [7], servers=0, work_load_list=[3, 1], env={"OWN": "yes"})
    assert found == [("3,1", "yes", [7, 0]), ("3,1", "yes", [7, 1])]
    out, errors = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[worker 0] here", "[worker 1] here"]
    assert sorted(errors.splitlines()) == ["[worker 0] warned", "[worker 1] warned"]


def test_a_worker_may_launch_a_job_of_its_own() -> None:
    def outer() -> list[str]:
        return gangline.launch(lambda: os.environ["WORLD_SIZE"], workers=1, servers=0)

    assert gangline.launch(outer, workers=1, servers=0) == [["1"]]


def push_in_a_fork() -> list[float]:
    kv = gangline.create("dist_sync")
    kv.init("w", torch.zeros(2))
    child = os.fork()
    if not child:
        refused = []
        for call in (lambda: kv.push("w", torch.ones(2)), lambda: kv.pull("w", torch.empty(2)), kv.barrier):
            try:
                call()
            except GanglineError as error:
                refused.append("from which this one was forked" in str(error))
        kv.close()
        os._exit(refused != [True] * 3)
    assert os.waitpid(child, 0)[1] == 0
    found = []
    for _ in range(2):
        kv.push("w", torch.ones(2))
        kv.pull("w", out := torch.empty(2))
        found += out.tolist()
    kv.close()
    with pytest.raises(RuntimeError, match="start the job again"):
        kv.push("w", torch.ones(2))
    return found


def test_a_forked_process_has_no_part_in_the_job() -> None:
    assert run_job(push_in_a_fork, 2, 1) == [[2.0] * 4] * 2


def test_output_goes_where_sys_stdout_goes() -> None:
    with redirect_stdout(io.StringIO()) as out:
        gangline.launch(lambda: print("grüße"), workers=1, servers=0)
    assert out.getvalue() == "[worker 0] grüße\n"


class OwnError(ValueError):
    """An error class of the program."""


def fail(how: str) -> None:
    if os.environ["RANK"] == "0":
        time.sleep(60)
    match how:
        case "raise":
            raise KeyError("no such thing")
        case "own":
            raise OwnError("bad")
        case "exit 3":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        pytest.param("raise", KeyError, "no such thing", marks=pytest.mark.slow),
        pytest.param(
            "exit 3",
            DeadNodeError,
            r"worker 1 \(pid \d+\) exited with code 3, without a result",
            marks=pytest.mark.slow,
        ),
        ("own", ValueError, "test_launch_functions.OwnError: bad"),
        pytest.param("kill", DeadNodeError, r"worker 1 \(pid \d+\) was killed by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_the_first_failure_is_raised_and_stops_the_others(how: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        gangline.launch(fail, how, servers=0)
    if kind is not DeadNodeError:
        (note,) = caught.value.__notes__
        assert note.startswith("raised by worker 1 of 2:\nTraceback")
        assert f'{Path(__file__).name}", line' in note


def test_a_worker_that_exits_with_code_0_has_no_result() -> None:
    with pytest.raises(DeadNodeError, match="worker 0 of 1 exited with code 0 and without a result"):
        gangline.launch(sys.exit, 0, workers=1, servers=0)


def test_a_job_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(StallError, match=r"did not end within 1 s; workers 0, 1 had no result"):
        gangline.launch(time.sleep, 60, servers=0, timeout=1)


@pytest.mark.slow
def test_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"function .* cannot be pickled: .*lock.*; it uses something"):
        gangline.launch(lambda: lock)
    with pytest.raises(ValueError, match=r"argument 1 of launch, of type lock, cannot be pickled"):
        gangline.launch(print, lock)
    with pytest.raises(ValueError, match=r"the result of worker 0, of type lock, cannot be pickled") as caught:
        gangline.launch(threading.Lock, workers=1, servers=0)
    assert "raised by worker 0 of 1" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: gangline.launch(print, workers=0), ValueError, "workers is 0; expected at least 1"),
        (lambda: gangline.launch(print, servers="1"), TypeError, "servers is '1'; expected an int"),
        (lambda: gangline.launch(print, work_load_list=[1]), ValueError, "work_load_list has 1 entries for 2 workers"),
        (lambda: gangline.launch(print, gpus=[512]), ValueError, "gpus names 512, which this machine does not have"),
        (lambda: gangline.launch(7), TypeError, "launch got 7; expected a function"),  # type: ignore[arg-type]
    ],
)
def test_wrong_options_are_named(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


WAITING = """
import os, time, gangline

def wait():
    os.fork() or time.sleep(60)
    print("ready", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    gangline.launch(wait)
"""


def script(folder: Path, text: str, **options: object) -> Launch:
    path = folder / "script.py"
    path.write_text(text)
    return Launch([sys.executable, str(path)], cwd=ROOT, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_signal_to_the_script_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    with script(tmp_path, WAITING) as run:
        run.hear("[worker 0] ready", "[worker 1] ready")
        run.process.send_signal(number)
        assert run.process.wait(30) == (-number if number != signal.SIGINT else -signal.SIGINT)
        deadline = time.monotonic() + 30
        while run.running() and time.monotonic() < deadline:
            time.sleep(0.05)
        _, _, errors = run.end()
        if number == signal.SIGINT:
            assert errors[-1] == "KeyboardInterrupt"


NOTEBOOK = """
import os, gangline

class Place:
    def __init__(self, rank):
        self.rank = rank

def place():
    print("here")
    return Place(int(os.environ["RANK"]))

found = gangline.launch(place, servers=0)
print([one.rank for one in found], isinstance(found[0], Place))
"""


@pytest.mark.slow
def test_a_program_without_a_file_sends_its_functions_and_classes() -> None:
    with Launch([sys.executable], cwd=ROOT, stdin=subprocess.PIPE) as run:
        assert run.process.stdin is not None
        run.process.stdin.write(NOTEBOOK.encode())
        run.process.stdin.close()
        run.process.stdin = None
        code, out, errors = run.end()
        assert (code, errors) == (0, [])
        assert sorted(out) == ["[0, 1] True", "[worker 0] here", "[worker 1] here"]


GUARDED = NOTEBOOK.replace("found =", "if __name__ == '__main__':\n    found =").replace("print([", "    print([")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GUARDED, "[0, 1] True"),
        (NOTEBOOK, "or install cloudpickle: workers then need no script"),
        (None, "this program is not a file: install cloudpickle (pip install cloudpickle)"),
    ],
)
def test_without_cloudpickle_workers_import_the_script(tmp_path: Path, text: str | None, expected: str) -> None:
    (tmp_path / "cloudpickle.py").write_text("raise ImportError")
    path = tmp_path / "script.py"
    path.write_text(text or "")
    done = subprocess.run(
        [sys.executable, str(path) if text else "-"],
        input=None if text else NOTEBOOK,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert expected in done.stdout + done.stderr


@pytest.mark.slow
def test_a_notebook_shows_output_in_its_cell() -> None:
    if importlib.util.find_spec("nbclient") is None or importlib.util.find_spec("ipykernel") is None:
        pytest.skip("needs nbclient and ipykernel: pip install nbclient ipykernel")
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    cells = [new_code_cell("import torch"), new_code_cell(NOTEBOOK), new_code_cell("gangline.launch(lambda: 1 / 0)")]
    notebook = new_notebook(cells=cells)
    NotebookClient(notebook, allow_errors=True, timeout=60, kernel_name="python3").execute()
    printed = "".join(one["text"] for one in cells[1]["outputs"])
    assert sorted(printed.splitlines()) == ["[0, 1] True", "[worker 0] here", "[worker 1] here"]
    assert [one["ename"] for one in cells[2]["outputs"] if one["output_type"] == "error"] == ["ZeroDivisionError"]
