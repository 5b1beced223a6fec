"""Each collective is stated once: one table says what it reads, writes and takes, and core.c has the same table."""

from __future__ import annotations

import ast
import re

from gangline.collectives.call_signature import TABLE, Ranks
from tests.programs import ROOT, product_files

NAMES = {rule.name for rule in TABLE if rule.writes is not Ranks.NONE}
LISTS = {
    "call_signature.py": "what each does",
    "algorithms/__init__.py": "its schedules",
    "schedule/schedule.py": "which have a root",
    "tuner.py": "its algorithms by size",
    "torch_backend/calls.py": "torch's name and arguments",
    "devices/backends/nccl.py": "NCCL's between the GPUs of a process",
}
"""Files of collectives/ that list collectives by name, with what they state."""
RANKS = {"NO_RANK": Ranks.NONE, "ALL_RANKS": Ranks.ALL, "ROOT": Ranks.ROOT, "OTHER_RANKS": Ranks.OTHERS}


def test_collectives_are_listed_by_name_in_few_files() -> None:
    listing = set()
    for file in product_files("collectives"):
        texts = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
        if len(NAMES & texts) > len(NAMES) // 2:
            listing.add(str(file.relative_to(ROOT / "collectives")))
    assert listing == LISTS.keys()


def test_the_core_has_the_same_table() -> None:
    rows = re.findall(r"\[(\w+)\] = \{([A-Z_]+), (\w+), ([01, ]+)\}", (ROOT / "collectives" / "core.c").read_text())
    rules = [
        (name.lower(), RANKS[reads], RANKS[writes], *(flag == "1" for flag in flags.split(", ")))
        for name, reads, writes, flags in rows
    ]
    assert rules == [tuple(rule) for rule in TABLE[: len(rules)]]
    assert len(rules) == len(NAMES) + 1  # and a barrier
