"""A script that calls `torch.set_default_device("cuda")`: what gangline keeps on the host stays there."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

from tests.default_device import Weights, check, module, sparse, trainer
from tests.kvstore.test_launch import launch
from tests.programs import ROOT, product_files


def test_every_new_tensor_names_its_device() -> None:
    functions = {f"torch.{one.__name__}" for one in _device_constructors()}
    assert "torch.zeros" in functions
    missing = [
        f"{file.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for file in product_files("collectives", "kvstore", "models", "gangline")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in functions
        and not any(one.arg in ("device", None) for one in call.keywords)
    ]
    assert missing == []


@pytest.mark.parametrize(("way", "store"), [(module, "device"), (trainer, "local"), (sparse, "device")])
def test_contexts(way: Callable[[str], Weights], store: str) -> None:
    check(partial(way, store), partial(way, store))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "words"),
    [("0", ()), *(("1", (way,)) for way in ("module", "trainer", "sparse"))],
)
def test_jobs(servers: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORES", str(tmp_path))
    with launch("-n", "2", "-s", servers, "--", sys.executable, "-m", "tests.default_device", *words) as job:
        code, output, errors = job.end()
    assert code == 0, "\n".join([*output, *errors])
