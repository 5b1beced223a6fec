"""`gangline join`: workers on other hosts, which are network namespaces, come to an elastic job, leave it and die."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gangline.cli.main import app
from gangline.collectives.environments.job_key import FILE, JobKey, write_file
from gangline.kvstore.parameter_server import protocol
from tests.hosts import Hosts, obstacle
from tests.kvstore.test_launch import ROOT, Launch
from tests.scripted_faults import variables

pytestmark = [pytest.mark.timeout(110), pytest.mark.skipif(obstacle() is not None, reason=obstacle() or "")]
COUNT = """\
import os, sys, time, torch, gangline
torch.set_num_threads(1)
weights = {name: torch.nn.Parameter(torch.zeros(240, dtype=torch.float64)) for name in "ab"}
trainer = gangline.Trainer(weights, "sgd", {"learning_rate": 24.0}, kvstore="dist_sync")
kv = trainer.kvstore
for step in range(kv.first_step, 20):
    share = kv.share(24, step)
    if share is None:
        break
    epoch, number = divmod(step, 10)
    order = torch.randperm(240, generator=torch.Generator().manual_seed(epoch))
    indices = order[24 * number : 24 * (number + 1)][share]
    if kv.rank == 0 and step in WAITS:
        print("at", step, flush=True)
        while sorted(kv._scheduler.views[-1][1]) != WAITS[step]:
            time.sleep(0.005)
    if kv.rank == 2 and step == 9 and "FAILS" in os.environ:
        raise ValueError("this host has no such file")
    trainer.zero_grad()
    if len(indices):
        sum(weight[indices].mean() for weight in weights.values()).backward()  # 1 / 24 of each sample of the batch
    trainer.step(len(indices))
if kv.rank == 0:
    kv.pull(list(weights), [weight.data for weight in weights.values()])
    print("seen", sorted({-round(float(one), 9) for weight in weights.values() for one in weight}), flush=True)
kv.close()
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    write_file(JobKey.new(), tmp_path / "key")
    monkeypatch.setenv(FILE, str(tmp_path / "key"))
    monkeypatch.setenv("GANGLINE_HEARTBEAT_LIMIT", "4")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Hosts(2) as found:
        yield found


def elastic(hosts: Hosts, code: str, bounds: str = "1:3", workers: int = 2) -> tuple[Launch, str]:
    """Launch an elastic job on the first host; return it, and the address that it prints."""
    words = ["launch", "-n", str(workers), "-s", "2", *(["--elastic", bounds] if bounds else [])]
    inside = ["ip", "netns", "exec", hosts.names[0], sys.executable, "-m", "gangline"]
    run = Launch([*inside, *words, "--", sys.executable, "-c", code], cwd=ROOT)
    text = b""
    while bounds and not (found := re.search(rb"gangline join (\S+) -- ", text)):
        data = os.read(run.process.stderr.fileno(), 1 << 16)
        assert data, text
        text += data
    return run, found[1].decode() if bounds else ""


def join(hosts: Hosts, address: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    return hosts.start(1, [sys.executable, "-m", "gangline", "join", address, "--", *words], environment)


def join_unseen(hosts: Hosts, address: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Join in a namespace of processes, so that the scheduler cannot see whether the worker runs."""
    unseen = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", '"$@"; exit $?', "sh"]
    return hosts.start(1, [*unseen, sys.executable, "-m", "gangline", "join", address, "--", *words], environment)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sigterm", "kill", "kill in a pull", "error", "cut"])
def test_each_sample_is_seen_once_though_a_worker_of_another_host_comes_and_goes(hosts: Hosts, way: str) -> None:
    code = f"WAITS = {{3: [0, 1, 2], 14: [0, 1]}}\n{COUNT}"
    run, address = elastic(hosts, code)
    scripts = {"kill": variables("worker 2 kill at push-sent 6"), "error": {"FAILS": "1"}}
    with run:
        run.hear("at 3")
        begin = join if way in ("sigterm", "kill in a pull") else join_unseen
        guest = begin(hosts, address, sys.executable, "-c", code, **scripts.get(way, {}))
        run.hear("at 14")
        if way == "cut":
            hosts.cut(1)
        elif way in ("sigterm", "kill in a pull"):
            guest.send_signal(signal.SIGTERM if way == "sigterm" else signal.SIGKILL)
        status, out, errors = run.end(90)
        _, text = guest.communicate(timeout=30)
    assert status == 0, errors
    assert "[worker 0] seen [2.0]" in out
    assert text.startswith(f"gangline: worker 2 of the job at {address}\n")
    codes = {"sigterm": 0, "error": 1, "cut": 1, "kill": 128 + signal.SIGKILL, "kill in a pull": -signal.SIGKILL}
    assert guest.returncode == codes[way], text
    assert ("DeadNodeError" in text, "no such file" in text) == (way == "cut", way == "error")
    replaced = "gangline: worker 2 on another host has died; another process repeats its round here, and leaves"
    assert (replaced in errors) == (way != "sigterm")


@pytest.mark.slow
def test_a_worker_of_another_host_that_ends_before_it_takes_part_changes_nothing(hosts: Hosts) -> None:
    code = f"WAITS = {{3: [0, 1, 3]}}\n{COUNT}"
    run, address = elastic(hosts, code)
    with run:
        run.hear("at 3")
        early = join(hosts, address, sys.executable, "-c", "import gangline; gangline.create('dist_sync'); 1 / 0")
        assert "ZeroDivisionError" in early.communicate(timeout=60)[1]
        join(hosts, address, sys.executable, "-c", code)
        status, out, errors = run.end(90)
    assert (status, "[worker 0] seen [2.0]" in out) == (0, True), errors
    assert not any("has died" in line for line in errors)


@pytest.mark.slow
def test_the_launcher_counts_workers_of_other_hosts(hosts: Hosts) -> None:
    run, address = elastic(hosts, f"WAITS = {{3: [0, 1], 5: [0]}}\n{COUNT}", workers=1, bounds="1:2")
    with run:
        run.hear("at 3")
        guest = join(hosts, address, sys.executable, "-c", f"WAITS = {{}}\n{COUNT}")
        run.hear("at 5")
        words = (sys.executable, "-m", "gangline", "resize", str(run.process.pid), "2")
        inside = ["ip", "netns", "exec", hosts.names[0]]
        text = subprocess.run([*inside, *words], capture_output=True, text=True, check=False).stderr
        assert text == "gangline: '2' workers; expected 1 to 1 beside 1 on other hosts\n"
        late = join(hosts, address, "true")
        assert late.communicate(timeout=30)[1] == "gangline: the job has 2 workers already, and at most 2\n"
        guest.send_signal(signal.SIGTERM)
        status, out, errors = run.end(60)
    assert (status, "[worker 0] seen [2.0]" in out) == (0, True), errors


OLDER = (
    "older = lambda head: head[:1] + bytes([head[1] - 1]) + head[2:]; protocol.VERSION -= 1; "
    "protocol._heads.update([(cls, older(head)) for cls, head in protocol._heads.items()]); "
    "protocol._kinds = {older(head): known for head, known in protocol._kinds.items()}"
)
"""Makes the messages of a process those of the version before."""
HELD = "import time, gangline; kv = gangline.create('dist_sync'); print('here', flush=True); time.sleep(100)"


@pytest.mark.slow
def test_joins_that_cannot_succeed_end_with_the_reason(hosts: Hosts, tmp_path: Path) -> None:
    write_file(JobKey.new(), tmp_path / "other")
    run, address = elastic(hosts, HELD, workers=1)
    nobody = f"{hosts.addresses[0]}:9"
    old = "import sys, importlib.metadata as found; from gangline.kvstore.parameter_server import protocol; {}; "
    old += f"sys.argv = ['gangline', 'join', '{address}', 'true']; from gangline.cli.main import main; main()"
    with run:
        run.hear("here")
        started = [
            join(hosts, address, "true", **{FILE: str(tmp_path / "other")}),
            join(hosts, address, "true", **{FILE: ""}),
            hosts.start(1, [sys.executable, "-m", "gangline", "join", "--timeout", "1", nobody, "true"]),
            hosts.start(1, [sys.executable, "-c", old.format("found.version = lambda name: '0.1'")]),
            hosts.start(1, [sys.executable, "-c", old.format(OLDER)]),
        ]
        texts = [one.communicate(timeout=60)[1] for one in started]
        assert [one.returncode for one in started] == [1] * 5
    assert f"the process at {address} does not admit this process's key: {FILE} must name" in texts[0]
    assert f"address {hosts.addresses[0]} can be reached from other machines, and without a job key" in texts[1]
    assert texts[2].startswith(f"gangline: the job at {nobody} has nothing that listens there: the job is over or")
    assert "this host has gangline 0.1, and the job " in texts[3]
    assert f"received a message of protocol version {protocol.VERSION}; expected {protocol.VERSION - 1}" in texts[4]


@pytest.mark.slow
@pytest.mark.parametrize("bounds", ["", "1:3"])
def test_jobs_that_take_no_workers_say_why(hosts: Hosts, bounds: str) -> None:
    def refusal() -> str:
        words = [sys.executable, "-m", "gangline", "join", "--timeout", "2", address, "true"]
        started = hosts.start(0, words)
        text = started.communicate(timeout=60)[1]
        assert started.returncode == 1
        return text

    code = "import time; print('here', flush=True); time.sleep(20)"
    words = ["launch", "-n", "1", "-s", "1", *(["--elastic", bounds] if bounds else [])]
    inside = ["ip", "netns", "exec", hosts.names[0], sys.executable, "-m", "gangline"]
    with Launch([*inside, *words, "--", sys.executable, "-c", code if bounds else HELD], cwd=ROOT) as run:
        run.hear("here")
        text = os.read(run.process.stderr.fileno(), 1 << 16).decode()
        found = re.search(r"readers attach at ([0-9.:]+)(.*)", text)
        assert found, text
        assert found[2] == (f", with the key of {FILE}" if bounds else "")
        address = found[1]
        why = "answers: the job has not begun: some of" if bounds else "the job is not elastic; expected one of"
        assert why in refusal()
    assert "has nothing that listens there: the job is over or has not begun" in refusal()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["10.0.0.1", "true"], "'10.0.0.1' is no address; expected HOST:PORT as `gangline launch --elastic` prints it"),
        (["10.0.0.1:0", "true"], "'10.0.0.1:0' is no address"),
        (["10.0.0.1:9", "--"], "the worker's command is missing; expected gangline join [OPTIONS] HOST:PORT -- CMD"),
        (["10.0.0.1:9", "--timeout", "3", "true"], "the worker's command is missing"),
        (["10.0.0.1:9", "--", "no-such-command"], "'no-such-command' is not a command of this host"),
    ],
)
def test_wrong_words_of_join_are_named(words: list[str], text: str) -> None:
    assert text in str(CliRunner().invoke(app, ["join", *words]).exception)


def test_an_interface_without_a_key_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE, raising=False)
    words = ["launch", "-n", "1", "--elastic", "1:2", "--interface", "lo", "--", "true"]
    assert f"it needs --elastic, and a key in {FILE}" in str(CliRunner().invoke(app, words).exception)
