"""Manifests of a job on Kubernetes: an indexed Job with a headless Service, a JobSet, or a RayJob.

The job's key is in a Secret that the user makes; manifests only name it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gangline.launcher.job import JobSpec

_PORT = 29500
_KEY_FOLDER = "/var/run/gangline"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
Manifest = dict[str, Any]


class KubernetesKind(StrEnum):
    """Kinds of manifests."""

    JOB = "job"
    JOBSET = "jobset"
    RAYJOB = "rayjob"


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """Settings of the manifests."""

    image: str
    """Container image with gangline and the training program."""
    name: str = "gangline"
    kind: KubernetesKind = KubernetesKind.JOB
    gpus: int = 0
    """Number of GPUs of each worker."""
    grace: float = 30.0
    """Seconds from SIGTERM until the containers are killed."""


def manifests(job: JobSpec, options: KubernetesOptions) -> list[Manifest]:
    """Return the manifests of a job, in the order in which they are applied.

    Workers are the pods of an indexed Job. With servers, another pod runs the scheduler and all servers.
    """
    name = options.name
    if options.kind is KubernetesKind.RAYJOB:
        return [_rayjob(job, options)]
    if options.kind is KubernetesKind.JOBSET:
        parts = [("workers", _worker_job(job, options, f"{name}-workers-0-0.{name}", f"{name}-servers-0-0.{name}"))]
        if job.servers:
            parts.insert(0, ("servers", _server_job(job, options, f"{name}-servers-0-0.{name}")))
        spec = {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["workers"]},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": part, "replicas": 1, "template": {"spec": own}} for part, own in parts],
        }
        return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", name, spec)]
    labels = {"app.kubernetes.io/name": "gangline", "app.kubernetes.io/instance": name}
    service = {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True}
    found = [_object("v1", "Service", name, service)]
    if job.servers:
        found.append(
            _native_job(f"{name}-servers", _server_job(job, options, f"{name}-servers-0.{name}"), labels, name)
        )
    workers = _worker_job(job, options, f"{name}-0.{name}", f"{name}-servers-0.{name}")
    return [*found, _native_job(name, workers, labels, name)]


def text(found: Sequence[Manifest]) -> str:
    """Return manifests as one stream of YAML documents, written as JSON, which is YAML."""
    return "".join(f"---\n{json.dumps(one, indent=2)}\n" for one in found)


def _object(version: str, kind: str, name: str, spec: Manifest) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _native_job(name: str, spec: Manifest, labels: dict[str, str], service: str) -> Manifest:
    spec["template"]["metadata"] = {"labels": labels}
    spec["template"]["spec"]["subdomain"] = service
    return _object("batch/v1", "Job", name, spec)


def _worker_job(job: JobSpec, options: KubernetesOptions, master: str, root: str) -> Manifest:
    """Return the spec of the indexed Job of the workers.

    A pod that exits with 75 wrote a checkpoint because its node was drained: it is started again, however often that
    happens. Any other failure ends the job.
    """
    env = {"MASTER_ADDR": master, "MASTER_PORT": str(_PORT), "WORLD_SIZE": str(job.workers), "LOCAL_RANK": "0"}
    env |= {"LOCAL_WORLD_SIZE": "1", "PYTHONUNBUFFERED": "1"}
    if job.work_load_list:
        env["GANGLINE_WORK_LOAD_LIST"] = job.loads_text()
    container = _container("worker", list(job.command), options, env)
    container["env"].append({"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}})
    if job.servers:
        container["env"] += _variables({**_server_variables(job, root), "DMLC_ROLE": "worker"})
        container["env"].append({"name": "DMLC_WORKER_ID", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}})
    if options.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(options.gpus)}}
    policy = {
        "rules": [
            {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}},
        ]
    }
    return {**_indexed(job.workers, [container], options), "podFailurePolicy": policy}


def _server_job(job: JobSpec, options: KubernetesOptions, root: str) -> Manifest:
    """Return the spec of the Job whose one pod runs the scheduler and the servers."""
    roles = ["scheduler", *(f"server-{rank}" for rank in range(job.servers))]
    containers = []
    for label in roles:
        role = label.partition("-")[0]
        command = ["python", "-m", f"gangline.kvstore.parameter_server.{role}"]
        containers.append(_container(label, command, options, {**_server_variables(job, root), "DMLC_ROLE": role}))
    return _indexed(1, containers, options)


def _indexed(count: int, containers: list[Manifest], options: KubernetesOptions) -> Manifest:
    key = {"secretName": f"{options.name}-key", "defaultMode": 0o400, "items": [{"key": "key", "path": "key"}]}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(options.grace),
        "containers": containers,
        "volumes": [{"name": "job-key", "secret": key}],
    }
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }


def _container(name: str, command: list[str], options: KubernetesOptions, env: dict[str, str]) -> Manifest:
    return {
        "name": name,
        "image": options.image,
        "command": command,
        "env": _variables({**env, "GANGLINE_JOB_KEY_FILE": f"{_KEY_FOLDER}/key", "GANGLINE_JOB_ID": options.name}),
        "volumeMounts": [{"name": "job-key", "mountPath": _KEY_FOLDER, "readOnly": True}],
    }


def _variables(values: dict[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _server_variables(job: JobSpec, root: str) -> dict[str, str]:
    return {
        "DMLC_PS_ROOT_URI": root,
        "DMLC_PS_ROOT_PORT": str(_PORT + 1),
        "DMLC_NUM_WORKER": str(job.workers),
        "DMLC_NUM_SERVER": str(job.servers),
    }


def _rayjob(job: JobSpec, options: KubernetesOptions) -> Manifest:
    """Return a RayJob whose cluster has a head and one worker pod for each worker."""
    entrypoint = ["gangline", "launch", "--launcher", "ray", "-n", str(job.workers), "-s", str(job.servers), "--"]
    limits = {"nvidia.com/gpu": str(options.gpus)} if options.gpus else {"cpu": "1"}

    def template(name: str, resources: dict[str, str]) -> Manifest:
        container = {"name": name, "image": options.image, "resources": {"limits": resources}}
        return {"spec": {"containers": [container]}}

    group = {
        "groupName": "workers",
        "replicas": job.workers,
        "minReplicas": job.workers,
        "maxReplicas": job.workers,
        "rayStartParams": {},
        "template": template("ray-worker", limits),
    }
    spec = {
        "entrypoint": shlex.join([*entrypoint, *job.command]),
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": {
            "headGroupSpec": {"rayStartParams": {}, "template": template("ray-head", {"cpu": "1"})},
            "workerGroupSpecs": [group],
        },
    }
    return _object("ray.io/v1", "RayJob", options.name, spec)
