"""Training scripts as people publish them get the weights of one process from `gangline.balance(model, loader)`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.strangers.table import FOLDER, LOOPS, LOSSES, REFUSED, ROWS, difference

EXACT = LOSSES | LOOPS
BACKENDS = ("gloo", "gangline")
UNWEIGHTED = ("DETR criterion", "SimCLR", "CLIP", "out of memory on one rank")
"""Each rank divides by the global count or computes the whole loss: a plain mean is right; skip() needs weights."""
PAGE = (Path(__file__).parents[2] / "docs" / "unequal.md").read_text()


LONG = ("compiled, then wrapped",)


def half_fast(names: Iterable[str]) -> list[Any]:
    """Return the names as parameters, every second one marked slow: a script takes 2 to 5 s."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=slow) if index % 2 or name in LONG else name for index, name in enumerate(names)]


def check(name: str, size: int, wrapper: str, backend: str, **options: Any) -> None:
    found, _ = difference(EXACT[name], size, wrapper, backend, **options)
    print(f"{name}, {size} ranks, {wrapper}, {backend}: {found:.1e}")
    assert found <= EXACT[name].tolerance


@pytest.mark.parametrize("name", half_fast(LOSSES) + half_fast(LOOPS))
def test_scripts_get_the_weights_of_the_plain_script(name: str) -> None:
    check(name, 2, EXACT[name].wrappers[0], BACKENDS[name in LOOPS])


@pytest.mark.parametrize("name", half_fast(REFUSED))
def test_what_cannot_be_exact_is_refused_or_warned_of_or_on_the_page(name: str) -> None:
    row = REFUSED[name]
    if row.refusal:
        with pytest.raises(RuntimeError) as raised:
            difference(row, 2, row.wrappers[0], "gloo")
        texts = str(raised.value).splitlines()
        assert all(texts)  # no rank ends as if nothing had happened
        assert row.refusal in str(raised.value)
        return
    found, warned = difference(row, 2, row.wrappers[0], "gloo")
    assert found > 1e-6
    assert row.page in PAGE
    assert row.warning in " ".join(warned)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("name", "wrapper"), [(name, wrapper) for name, row in EXACT.items() for wrapper in row.wrappers]
)
def test_the_weights_are_those_of_the_plain_script_with_every_wrapper_and_backend(
    name: str, wrapper: str, size: int
) -> None:
    for backend in BACKENDS:
        check(name, size, wrapper, backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_measured_loads_give_the_weights_of_the_plain_script(name: str) -> None:
    if EXACT[name].script != "out_of_memory":  # its large samples are the share of rank 1 by fixed loads
        check(name, 2, EXACT[name].wrappers[0], "gloo", loads="auto")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXACT if name not in UNWEIGHTED])
def test_without_weights_of_gradients_the_weights_are_others(name: str) -> None:
    found, _ = difference(EXACT[name], 2, "ddp", "gloo", loss_reduction="normalized")
    assert found > 1e-6


def test_scripts_have_one_line_of_gangline_and_all_of_them_run() -> None:
    scripts = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    scripts = {name: text for name, text in scripts.items() if name not in ("utils", "table", "test_strangers")}
    assert {name: text.count("gangline.balance(") for name, text in scripts.items()} == dict.fromkeys(scripts, 1)
    assert {row.script for row in ROWS.values()} == scripts.keys()
