"""Output of `gangline launch --dry-run` for Kubernetes and Slurm; nothing is submitted."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gangline.cli.main import app
from gangline.launcher.engines.kubernetes import KubernetesKind, KubernetesOptions, manifests, text
from gangline.launcher.job import JobSpec
from tests.clusters.schemas import JOBSET, RAYJOB


def job(servers: int) -> JobSpec:
    return JobSpec(("python", "train.py", "--kv-store", "dist_sync"), 3, servers, work_load_list=(2.0, 1.0, 1.0))


def printed(kind: KubernetesKind, servers: int = 2) -> list[dict[str, Any]]:
    """Return the manifests of a job, read back from their text."""
    words = text(manifests(job(servers), KubernetesOptions("example/image:1", "digits", kind, gpus=1)))
    return [json.loads(one) for one in words.split("---\n")[1:]]


def native(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a manifest as native kinds: the Jobs of a JobSet, the Pods of a RayJob."""
    if found["kind"] == "JobSet":
        parts = found["spec"]["replicatedJobs"]
        return [
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": part["name"]}, **part["template"]}
            for part in parts
        ]
    if found["kind"] == "RayJob":
        cluster = found["spec"]["rayClusterSpec"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **one["template"]} for one in groups]
    return [found]


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("kind", KubernetesKind)
def test_manifests_fit_the_schemas_of_kubernetes(kind: KubernetesKind, servers: int) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for found in printed(kind, servers):
        for one in native(found):
            validator.validate(one, "1.31", strict=True)


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize(("kind", "schema"), [(KubernetesKind.JOBSET, JOBSET), (KubernetesKind.RAYJOB, RAYJOB)])
def test_custom_resources_fit_their_schemas(kind: KubernetesKind, schema: dict[str, Any], servers: int) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    (found,) = printed(kind, servers)
    jsonschema.validate(found, schema)


def test_pods_find_their_place_and_only_name_the_key() -> None:
    service, servers, workers = printed(KubernetesKind.JOB)
    assert (service["kind"], service["spec"]["clusterIP"], service["metadata"]["name"]) == ("Service", "None", "digits")
    pods = [one["spec"]["template"] for one in (servers, workers)]
    for pod in pods:
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert pod["spec"]["subdomain"] == "digits"
        (volume,) = pod["spec"]["volumes"]
        assert volume["secret"]["secretName"] == "digits-key"
    assert [one["name"] for one in pods[0]["spec"]["containers"]] == ["scheduler", "server-0", "server-1"]
    (worker,) = pods[1]["spec"]["containers"]
    variables = {one["name"]: one.get("value", "index") for one in worker["env"]}
    expected = {"MASTER_ADDR": "digits-0.digits", "DMLC_PS_ROOT_URI": "digits-servers-0.digits", "WORLD_SIZE": "3"}
    expected |= {"RANK": "index", "DMLC_WORKER_ID": "index", "GANGLINE_WORK_LOAD_LIST": "2.0,1.0,1.0"}
    assert expected.items() <= variables.items()
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert workers["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [75]
    (without,) = printed(KubernetesKind.JOB, servers=0)[1]["spec"]["template"]["spec"]["containers"]
    assert not any(one["name"].startswith("DMLC_") for one in without["env"])


def dry_run(*words: str) -> str:
    done = CliRunner().invoke(app, ["launch", "--dry-run", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_prints_the_same_manifests() -> None:
    out = dry_run("--launcher", "k8s", "--image", "example/image:1", "-n", "3", "-s", "0", "python", "train.py")
    assert [json.loads(one)["kind"] for one in out.split("---\n")[1:]] == ["Service", "Job"]


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
        (["--launcher", "k8s", "-n", "2"], "--launcher k8s needs --image"),
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
    yaml = pytest.importorskip("yaml", reason="pip install PyYAML")
    task = yaml.safe_load((Path(__file__).parents[2] / "docs" / "examples" / "skypilot.yaml").read_text())
    known = ("name", "num_nodes", "resources", "envs", "secrets", "file_mounts", "workdir", "setup", "run")
    assert task.keys() <= set(known)
    assert (type(task["num_nodes"]), type(task["resources"])) == (int, dict)
    for part in ("setup", "run"):
        assert subprocess.run(["sh", "-n"], input=task[part], text=True, capture_output=True).stderr == ""
    words = shlex.split(task["run"].splitlines()[-1])
    assert words[:2] == ["gangline", "train"]
