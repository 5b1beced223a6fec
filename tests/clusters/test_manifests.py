"""Manifests of docs/examples for Kubernetes and SkyPilot, and `gangline launch --dry-run` for Slurm; nothing runs."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gangline.cli.main import app
from tests.clusters.schemas import JOBSET

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def documents(name: str) -> list[Any]:
    """Return the YAML documents of an example."""
    yaml = pytest.importorskip("yaml", reason="pip install PyYAML")
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def jobs_of(jobset: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the Jobs that a JobSet makes."""
    return [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": part["name"]}, **part["template"]}
        for part in jobset["spec"]["replicatedJobs"]
    ]


def test_manifests_fit_the_schemas_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    (jobset,) = documents("jobset.yaml")
    jsonschema.validate(jobset, JOBSET)
    for one in (*documents("kubernetes.yaml"), *jobs_of(jobset)):
        validator.validate(one, "1.31", strict=True)


@pytest.mark.parametrize("name", ["kubernetes.yaml", "jobset.yaml"])
def test_pods_find_their_place_and_only_name_the_key(name: str) -> None:
    *found, last = documents(name)
    servers, workers = jobs_of(last) if name == "jobset.yaml" else (found[1], last)
    # a pod's name is that of its Job with its index, and its domain that of the service
    first, root = (f"{name}-0.digits" for name in ("digits", "digits-servers"))
    if name == "jobset.yaml":
        assert last["spec"]["network"]["subdomain"] == last["metadata"]["name"] == "digits"
        first, root = (f"digits-{one['metadata']['name']}-0-0.digits" for one in (workers, servers))
    else:
        service = found[0]
        assert (service["spec"]["clusterIP"], service["metadata"]["name"]) == ("None", "digits")
        assert [one["metadata"]["name"] for one in (servers, workers)] == ["digits-servers", "digits"]
        for pod in (servers["spec"]["template"], workers["spec"]["template"]):
            assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
            assert pod["spec"]["subdomain"] == "digits"
    containers = [one for job in (servers, workers) for one in job["spec"]["template"]["spec"]["containers"]]
    assert [one["name"] for one in containers] == ["server-0", "scheduler", "worker"]
    count = workers["spec"]["completions"]
    expected = {"DMLC_PS_ROOT_URI": root, "DMLC_NUM_WORKER": str(count), "DMLC_NUM_SERVER": "1"}
    for one in containers:
        variables = {each["name"]: each.get("value", "index") for each in one["env"]}
        assert expected.items() <= variables.items()
        assert variables["GANGLINE_JOB_KEY_FILE"] == one["volumeMounts"][0]["mountPath"] + "/key"
    place = {"MASTER_ADDR": first, "WORLD_SIZE": str(count), "RANK": "index", "DMLC_WORKER_ID": "index"}
    assert place.items() <= variables.items()
    for job in (servers, workers):
        (volume,) = job["spec"]["template"]["spec"]["volumes"]
        assert volume["secret"]["secretName"] == "digits-key"
    assert workers["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [75]


def dry_run(*words: str) -> str:
    done = CliRunner().invoke(app, ["launch", "--dry-run", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_batch_script_is_for_a_shell_and_for_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    words = ["--launcher", "slurm", "-n", "2", "-s", "1", "--grace", "90", "--name", "digits"]
    script = dry_run(*words, "--engine-option=--partition=gpu", "--", "python", "a b.py", "--load-epoch", "auto")
    assert subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True).stderr == ""
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        *("--job-name=digits", "--ntasks=2", "--signal=USR1@90", "--requeue", "--open-mode=append", "--partition=gpu")
    ]
    (command,) = [line for line in script.splitlines() if line.startswith(sys.executable)]
    assert shlex.split(command)[-5:] == ["--", "python", "a b.py", "--load-epoch", "auto"]
    lines = [line.strip() for line in script.splitlines()]
    assert lines.index('if [ "$code" -eq 75 ]; then') + 1 == lines.index('scontrol requeue "$SLURM_JOB_ID"')


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--launcher", "ssh"], "--launcher ssh needs the hosts"),
        (["-n", "2", "-H", "node1"], "--hostfile and -H are for --launcher ssh and mpi"),
        ([], "the number of workers is missing: -n"),
        (["-n", "1", "--stop-signals", "KILL"], "SIGKILL is not a signal that can stop a job"),
        (["--launcher", "mpi", "-n", "1", "--mpirun", "no-mpirun"], "no-mpirun cannot be run"),
        (["--launcher", "mpi", "-n", "1", "--mpirun", "true"], "expected Open MPI, MPICH or Intel MPI"),
    ],
)
def test_wrong_usage_is_named(words: list[str], error: str) -> None:
    done = CliRunner().invoke(app, ["launch", *words, "--", "true"])
    assert error in str(done.exception), done.output


def test_the_example_for_skypilot_has_the_shape_of_a_task() -> None:
    (task,) = documents("skypilot.yaml")
    known = ("name", "num_nodes", "resources", "envs", "secrets", "file_mounts", "workdir", "setup", "run")
    assert task.keys() <= set(known)
    assert (type(task["num_nodes"]), type(task["resources"])) == (int, dict)
    for part in ("setup", "run"):
        assert subprocess.run(["sh", "-n"], input=task[part], text=True, capture_output=True).stderr == ""
    words = shlex.split(task["run"].splitlines()[-1])
    assert words[:2] == ["gangline", "train"]
