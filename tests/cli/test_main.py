"""Package and command: lazy names, the command line, errors when another package hides ours, and `gangline env`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

import gangline
from gangline.cli.env import show_devices
from gangline.cli.main import app, main
from gangline.doctor.inventory import device_table
from tests.programs import python, run


def test_every_public_name_exists() -> None:
    for name in gangline.__all__:
        assert getattr(gangline, name) is not None
    with pytest.raises(AttributeError, match="'gangline' has no attribute 'modul'") as raised:
        gangline.modul  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("modul", gangline)  # of which Python suggests the nearest


def test_help_and_the_front_door_import_no_torch() -> None:
    code = (
        "import sys, gangline.models, gangline.kvstore, gangline.collectives, gangline.bench\n"
        "from gangline.cli.main import main\n"
        "sys.argv = ['gangline', *sys.argv[1:]]\n"
        "try: main()\n"
        "except SystemExit as end: print('exit', end.code)\n"
        "print([name for name in ('torch', 'numpy', 'sklearn', 'torchmetrics') if name in sys.modules])\n"
    )
    for arguments in (["--help"], ["train", "--help"]):
        done = python("-c", code, *arguments)
        assert done.stdout.endswith("exit 0\n[]\n"), done.stdout + done.stderr
    assert "--work-load-list" in done.stdout


@pytest.mark.parametrize("command", ["launch -n 1 -s 0 -- true >&-", "launch -n 1 -s 0 -- true 2>&-", "status >&-"])
def test_a_closed_standard_stream_is_no_error(command: str) -> None:
    run(["sh", "-c", f"exec {sys.executable} -m gangline {command}"], code=0)


def test_every_option_has_a_help_text() -> None:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert [one.name for one in command.params if not one.help] == [], name


@pytest.mark.slow
def test_env_reports_what_a_bug_report_needs() -> None:
    report = json.loads(CliRunner().invoke(app, ["env", "--json", "-"], env={"GANGLINE_TIMOUT": "5"}).stdout)
    assert report["variables"]["GANGLINE_TIMOUT"] == "5 (unknown; did you mean GANGLINE_TIMEOUT?)"
    assert "prometheus-client" in report["extras"]
    assert report["versions"]["torch"].startswith("2.")
    host = report["devices"]["cpu(0)"]
    assert host["context"] == "cpu(0)"
    assert 0 < host["memory_free"] <= host["memory_total"]
    assert report["checks"]["shared memory between ranks"] == "works"
    assert report["checks"]["shared memory"].startswith("ok: another process opens it")
    assert report["checks"]["cross-memory attach"]
    assert "ulimit -n is " in report["checks"]["open files"]
    assert report["launcher"] == {"found": "none"}


MISSPELT = """\
import sys
import gangline

def rank(comm):
    gangline.create("local")

if __name__ == "__main__":
    gangline.spawn(rank, 2, threads=1) if sys.argv[1:] else [gangline.create("device") for _ in range(2)]
"""


@pytest.mark.parametrize("words", [[], pytest.param(["ranks"], marks=pytest.mark.slow)])
def test_a_misspelt_variable_is_warned_of_once(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "misspelt.py").write_text(MISSPELT)
    done = python(tmp_path / "misspelt.py", *words, GANGLINE_TIMOUT=5, GANGLINE_XYZ=1, code=0)
    assert done.stderr.splitlines() == [
        "the environment variable GANGLINE_TIMOUT is unknown; did you mean GANGLINE_TIMEOUT?",
        "the environment variable GANGLINE_XYZ is unknown; gangline does not read it",
    ]


def test_env_shows_the_launcher_its_values_and_outer_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    from gangline.cli.env import launcher_report

    step = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "3"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    found = launcher_report()
    assert found == {
        "found": "Slurm (SLURM_PROCID)",
        "rank": 0,
        "size": 2,
        "local rank": 3,
        "node rank": 1,
        "rank 0": found["rank 0"],
    }
    assert found["rank 0"].startswith("unknown: MASTER_ADDR is not set")
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "29500"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    found = launcher_report()
    assert (found["rank"], found["size"], found["rank 0"]) == (1, 4, "10.1.2.3:29500")
    assert found["also found"] == "Slurm (SLURM_PROCID)"
    monkeypatch.setenv("DMLC_ROLE", "worker")
    assert launcher_report()["role"] == "worker"


@pytest.mark.slow
def test_version_and_log_level() -> None:
    assert python("-m", "gangline", "--version").stdout == f"gangline {gangline.__version__}\n"
    assert "Module" in dir(gangline)
    assert "sys" not in dir(gangline)
    wrong = python("-m", "gangline", "-v", "-q", "env")
    assert wrong.returncode == 2
    assert "-v and -q are both given" in wrong.stderr
    quiet = python("-m", "gangline", "-q", "train", "--network", "mlp", "--num-epochs", "1", "--cpus", "1")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    loud = python("-m", "gangline", "-v", "train", "--network", "nosuch")
    assert loud.returncode == 2
    assert "Traceback" in loud.stderr
    assert loud.stderr.splitlines()[-1].startswith("gangline: network 'nosuch' is unknown")


@pytest.mark.slow
def test_an_error_in_code_of_the_user_shows_where(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = torch.nn.Linear(784, 10)\n\n    def forward(self, images):\n"
        "        return self.fc(images.flatten(1)[:, :5])  # a wrong shape\n"
    )
    done = python("-m", "gangline", "train", "--network", "nets:Net", "--image-shape", "1,28,28", cwd=tmp_path)
    assert done.returncode == 2
    assert "# a wrong shape" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("gangline: ")


def test_wrong_usage_ends_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["nosuch"], ["train", "--nosuch"], ["train", "--batch-size", "many"], ["train", "--cpus", "0"]):
        monkeypatch.setattr(sys, "argv", ["gangline", *arguments])
        with pytest.raises(SystemExit, match="2"):
            main()


# The table of devices


def test_access_between_gpus_is_in_the_table_and_in_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs are as torch reports them."""
    properties = SimpleNamespace(name="Recorded", major=8, minor=6)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (index << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one < other)
    monkeypatch.setenv("COLUMNS", "200")
    show_devices(device_table())
    lines = capsys.readouterr().out.splitlines()
    assert ["gpu(1) P2P" in line for line in lines if "gpu(0) " in line] == [True, False]
    assert ["gpu(0) host" in line for line in lines if "gpu(1) " in line] == [False, True]
    _, first, second = map(asdict, device_table())
    assert (first["context"], first["peers"]) == ("gpu(0)", {"gpu(1)": "P2P"})
    assert second["memory_free"] == 1 << 30
