"""The table of mutants fits the code: each fault can be applied, and its tests exist."""

from __future__ import annotations

from pathlib import Path

from tests.mutants import ROOT, mutants


def test_each_mutant_is_a_fault_of_the_code_of_today() -> None:
    table = mutants()
    assert len({mutant.name for mutant in table}) == len(table)
    for mutant in table:
        text = (ROOT / mutant.path).read_text()
        applied = mutant.applied(text)
        assert applied != text, mutant.name
        if Path(mutant.path).suffix == ".py":
            compile(applied, mutant.path, "exec")
        assert all((ROOT / name).is_file() for name in mutant.tests.split()), mutant.name
