"""Files that gangline writes: each is opened so that no symbolic link of another user is followed."""

from __future__ import annotations

import ast
import re

from tests.programs import ROOT, product_files

ELSEWHERE = {
    "collectives/environments/job_key.py": "a key is always a new file",
    "bench/unequal/slow_process.py": "files of the kernel, which hold quotas",
    "gangline/advise/job_scaling.py": "in a temporary folder that only this user can enter",
    "gangline/launcher/functions.py": "memory of this process, by its descriptor",
    "kvstore/optimizer/state_parts.py": "a save's lock is always a new file, which O_EXCL makes",
    "gangline/launcher/function_process.py": "memory of the launcher, by its descriptor",
}


def _writes(call: ast.Call) -> bool:
    """Return whether a call opens a file to write it, and not by `host_files.opener`."""
    name = ast.unparse(call.func)
    if name.endswith((".write_text", ".write_bytes")):
        return True
    if not re.fullmatch(r"(.*\.)?open", name) or any(one.arg == "opener" for one in call.keywords):
        return False
    given = [*call.args, *(one.value for one in call.keywords)]
    modes = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return any(re.fullmatch("[rwaxbt+]*[wax+][bt+]*", mode) for mode in modes) or "os.O_CREAT" in ast.unparse(call)


def test_no_file_is_written_through_a_link_of_another_user() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for file in product_files("collectives", "kvstore", "models", "bench", "gangline")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and _writes(call)
    ]
    assert [one for one in found if one.partition(":")[0] not in ELSEWHERE] == []
    assert {one.partition(":")[0] for one in found} == set(ELSEWHERE)
