"""JSON schema of the JobSet of docs/examples/jobset.yaml.

Trimmed to the fields that may occur in ours, with the types and values that the project permits: JobSet v1alpha2
(kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go, Apache-2.0). Its Job templates are a native kind, which
kubernetes-validate checks.
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
