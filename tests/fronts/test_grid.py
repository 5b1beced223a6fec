"""Grid of fronts, stores and situations: each cell trains as one process does, or is refused by name on all workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.fronts.fronts import FRONTS, SITUATIONS, Place, Plain, play
from tests.fronts.jobs import STORES, Cell, Outcome, run

pytestmark = pytest.mark.timeout(300)

ALL, SEVERAL, ALONE = "", "allreduce|dist_sync|the default", "local|device|dist_async"
WORKERS = "allreduce|the default"
SHARDED = ".*, (weights|optimizer)"
TORCHS = "DistributedOptimizer.*|horovod"
TAKEN = "already; give (this Trainer|the .* others, or) a store of its own"
DIVIDED = "unsupported operation: more than one element of the written-to tensor"  # torch's text
REFUSED = [
    # stores, fronts and situations (empty: all), and the text of the error
    (
        "dist_async",
        "(?!Distributed).*",
        "clipped by an option",
        "clip_global_norm needs the sums of all workers, .*; expected a sync",
    ),
    ("dist_sync", SHARDED, ALL, "shard is for 'allreduce'"),
    (ALL, "Trainer.*|gluon", "unfrozen later", "requires_grad=True, but had False .*; make a new Trainer after"),
    (SEVERAL, TORCHS, "unfrozen later", "requires_grad=True, but had False .*; make a new DistributedOptimizer"),
    (SEVERAL, TORCHS, "added later", r"add_param_group\(\) came after .*; add all groups to the torch optimizer"),
    (ALL, "balance", "unfrozen later", "different gradients of branch.weight, .*; after unfreezing .* close"),
    (ALL, "Module((?!, weights).)*", "two on one store", TAKEN),
    (ALONE, "(Trainer|Module), weights", "two on one store", TAKEN),
    (SEVERAL, "DistributedOptimizer(, optimizer)?", "two on one store", TAKEN),
    (SEVERAL, "Trainer.backward", "skipped by all", r"backward\(\) came twice, .*; expected step\(\) after each"),
    (ALL, "Module, 2 contexts", "clip_grad_norm_", "gradients of first.weight, .*; expected clip_global_norm"),
    (SEVERAL, "Module", "clip_grad_norm_", "gradients of first.weight, .*; expected clip_global_norm"),
    (SEVERAL, "Trainer.*|gluon", "clip_grad_norm_", "gradients of .* were written .*; expected clip_global_norm"),
    (
        WORKERS,
        ".*, weights",
        "no gradient on (one|the other)",
        "MismatchError: the workers' calls differ: .*; expected",
    ),
    (WORKERS, ".*, weights", "load_state_dict.*", "has a part of the weights only, .*; call model_state_dict"),
    (WORKERS, ".*, weights", "(p.data.copy_|clamp_).*", DIVIDED),
    (WORKERS, "DistributedOptimizer, weights", "skipped by a GradScaler", DIVIDED),
    (WORKERS, "(DistributedOptimizer|Module), weights", "clip_grad_norm_", DIVIDED),
]
"""Cells that are refused; all others train as `Plain` does."""
EXACT = 1e-12


@cache
def expected(situation: str) -> Outcome:
    return play(Plain, SITUATIONS[situation], Place())


def names(patterns: Sequence[str], cell: Sequence[str]) -> bool:
    return all(not pattern or re.fullmatch(pattern, name) for pattern, name in zip(patterns, cell, strict=True))


def fault(store: str, cell: Cell, outcome: Outcome) -> str:
    """Return what is wrong with a worker's outcome."""
    right = expected(cell[1])
    refusals = [text for *of, text in REFUSED if names(of, (store, *cell))]
    assert len(refusals) <= 1, (store, cell)
    if isinstance(outcome, str) or refusals:
        text = refusals[0] if refusals else "the weights of one process"
        is_refused = refusals and isinstance(outcome, str) and re.search(text, outcome, re.DOTALL)
        return "" if is_refused else f"expected {text}, but got {outcome}"
    if outcome is None:  # this worker has no weights
        return ""
    assert isinstance(right, list)
    worst = max(abs(found - plain) for found, plain in zip(outcome, right, strict=True))
    return "" if worst <= EXACT else f"the weights differ from those of one process by {worst:.1e}"


def fast(store: str, front: str, situation: str) -> bool:
    """Return whether a cell is in the fast suite."""
    if store == "local":
        return front in ("Trainer", "Module", "Module, 2 contexts", "KVStore")
    if store == "dist_sync":
        return front in ("Trainer", "KVStore")
    if store == "the default":
        return front == "horovod" or situation == "first start"
    if store == "allreduce":
        if front == "Module, weights":
            return "frozen" in situation
        return not front.endswith(", optimizer") and front not in ("gluon", "Module.forward_backward_update", "horovod")
    return store == "gloo"


def cells(store: str, is_fast: bool) -> list[Cell]:
    return [
        (front, situation)
        for front in STORES[store]
        for situation in SITUATIONS
        if situation not in FRONTS[front].absent and fast(store, front, situation) == is_fast
        if store != "dist_sync" or situation == "first start" or not re.fullmatch(SHARDED, front)
    ]


def check(store: str, chosen: list[Cell], folder: Path) -> None:
    workers = run(store, chosen, folder)
    faults = [
        f"{store}, {', '.join(cell)}: worker {rank}: {text}"
        for cell, of_workers in zip(chosen, zip(*workers, strict=True), strict=True)
        for rank, outcome in enumerate(of_workers)
        if (text := fault(store, cell, outcome))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("store", [store for store in STORES if cells(store, True)])
def test_each_cell_trains_as_one_process_or_is_refused_by_name(store: str, tmp_path: Path) -> None:
    check(store, cells(store, True), tmp_path)


FURTHER = {(store, front) for store in STORES for front, _ in cells(store, False)}


@pytest.mark.slow
@pytest.mark.parametrize(("store", "front"), sorted(FURTHER))
def test_each_further_cell_trains_as_one_process_or_is_refused_by_name(store: str, front: str, tmp_path: Path) -> None:
    check(store, [cell for cell in cells(store, False) if cell[0] == front], tmp_path)
