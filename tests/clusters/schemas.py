"""JSON schemas of the custom resources that `gangline launch --launcher k8s` prints.

Trimmed to the fields that may occur in ours, with the types and values that these projects permit:
JobSet v1alpha2 (kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go) and RayJob v1 (ray-project/kuberay,
ray-operator/apis/ray/v1/rayjob_types.go and raycluster_types.go), both Apache-2.0. Pod and Job templates in them are
native kinds, which kubernetes-validate checks.
"""

from __future__ import annotations

from typing import Any


def _closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


_TEXT = {"type": "string"}
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_METADATA = _closed(["name"], name=_NAME, labels={"type": "object", "additionalProperties": _TEXT})
_TEMPLATE = {"type": "object", "required": ["spec"]}

JOBSET = _closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_METADATA,
    spec=_closed(
        [],
        network=_closed(
            [],
            enableDNSHostnames={"type": "boolean"},
            subdomain=_TEXT,
            publishNotReadyAddresses={"type": "boolean"},
        ),
        successPolicy=_closed(
            ["operator"],
            operator={"enum": ["All", "Any"]},
            targetReplicatedJobs={"type": "array", "items": _TEXT},
        ),
        failurePolicy=_closed([], maxRestarts=_NUMBER, restartStrategy={"enum": ["Recreate", "BlockingRecreate"]}),
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            "items": _closed(["name", "template"], name=_NAME, replicas=_NUMBER, template=_TEMPLATE),
        },
        suspend={"type": "boolean"},
        ttlSecondsAfterFinished=_NUMBER,
    ),
)

_START = {"type": "object", "additionalProperties": _TEXT}
RAYJOB = _closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_METADATA,
    spec=_closed(
        [],
        entrypoint=_TEXT,
        runtimeEnvYAML=_TEXT,
        backoffLimit=_NUMBER,
        shutdownAfterJobFinishes={"type": "boolean"},
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        rayClusterSpec=_closed(
            ["headGroupSpec"],
            rayVersion=_TEXT,
            headGroupSpec=_closed(["rayStartParams", "template"], rayStartParams=_START, template=_TEMPLATE),
            workerGroupSpecs={
                "type": "array",
                "items": _closed(
                    ["groupName", "maxReplicas", "minReplicas", "rayStartParams", "template"],
                    groupName=_TEXT,
                    replicas=_NUMBER,
                    minReplicas=_NUMBER,
                    maxReplicas=_NUMBER,
                    rayStartParams=_START,
                    template=_TEMPLATE,
                ),
            },
        ),
    ),
)
