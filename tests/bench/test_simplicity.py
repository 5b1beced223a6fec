"""`gangline bench simplicity`: what it counts, on small inputs, and on this code."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.bench.report.simplicity import count_lines, import_cycles, import_graph, measure

SOURCE = '''"""Title.

Text.
"""

import os  # a comment beside code


# alone
X = """a
string"""
"""An attribute."""
'''


def test_lines_are_code_docstring_comment_or_blank() -> None:
    assert count_lines(SOURCE) == {"docstring": 5, "blank": 3, "code": 3, "comment": 1}


def test_imports_inside_functions_count_and_those_for_type_checking_do_not(tmp_path: Path) -> None:
    files = {
        "__init__.py": "",
        "a.py": "from typing import TYPE_CHECKING\nfrom p import b\nif TYPE_CHECKING:\n    from p.c import x\n",
        "b.py": "def f():\n    import p.a\n",
        "c.py": "from .b import f\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    graph = import_graph(tmp_path, "p")
    assert graph == {"p": set(), "p.a": {"p.b"}, "p.b": {"p.a"}, "p.c": {"p.b"}}
    assert import_cycles(graph) == [["p.a", "p.b"]]
    assert import_cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


@pytest.mark.slow
def test_this_code_has_a_budget() -> None:
    rows = {row["measure"].strip(): row["value"] for row in measure()}
    lines = [rows[package] for package in ("collectives", "kvstore", "models", "bench")]
    assert rows["lines of the four packages"] == sum(lines)
    assert rows["files in the largest folder"] <= 12
    assert 0 < rows["frames of a large all_reduce"] < 20
    assert 0 < rows["rounds to open a communicator"] < 40
