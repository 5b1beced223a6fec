"""torch's own tests of torch.distributed, from the installed wheel: what gloo passes, gangline passes in its place."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.conformance.suites import named
from tests.programs import python

SKIPPED = {
    r"CUDA|Nccl|NCCL|nccl|Need at least \d GPUs?|high priority stream": "needs GPUs",
    r"world size": "needs another number of ranks",
    r"Only MPI supports": "calls that gloo lacks; test_torch_backend covers them",
    r"no torchvision": "needs torchvision",
    r"github.com/pytorch/pytorch|flak": "switched off by torch, for all backends",
    r"Requires file:// initialization": "starts a group twice, which tests of gangline do themselves",
}
"""Reasons of torch's skips, and what they mean."""


@cache
def outcomes_of(name: str, size: int, folder: str) -> dict[str, list[str]]:
    variables = {"BACKEND": "gloo", "WORLD_SIZE": str(size), "TEMP_DIR": folder}
    if name == "gangline":
        variables["GANGLINE_REPLACE_GLOO"] = "1"
    path = Path(folder) / f"{name}{size}.json"
    done = python("-m", "tests.collectives.torch_suite", path, DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=100, **variables)
    assert path.exists(), done.stdout[-3_000:] + done.stderr[-3_000:]
    outcomes: dict[str, list[str]] = json.loads(path.read_text())
    print(name, size, "ranks:", dict(Counter(outcome for outcome, _ in outcomes.values())))
    return outcomes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 3])
def test_what_gloo_passes_gangline_passes(size: int, tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's tests need it: pip install expecttest")
    by_gloo = outcomes_of("gloo", size, str(tmp_path))
    by_gangline = outcomes_of("gangline", size, str(tmp_path))
    assert len(by_gangline) > 250
    failed = {name: reason for name, (outcome, reason) in by_gangline.items() if outcome == "failed"}
    only_gloo = named("torch.distributed")
    assert not {name: why for name, why in failed.items() if name not in only_gloo and by_gloo[name][0] == "passed"}
    for name, (outcome, reason) in by_gangline.items():
        if outcome == "skipped":
            assert any(re.search(pattern, reason) for pattern in SKIPPED), f"{name}: {reason}"
            assert by_gloo[name][0] == "skipped", f"{name}: {reason}"
