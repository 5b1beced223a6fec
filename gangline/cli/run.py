"""`gangline run`: run a script whose torch.distributed calls name gloo on backend "gangline"."""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from gangline.usage_error import UsageError


def run(
    arguments: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS...]", help="Python file and its arguments.", show_default=False)
    ],
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
) -> None:
    """Run a Python script with backend "gangline" wherever it or a library asks torch.distributed for gloo.

    Under a launcher: torchrun --nproc-per-node 4 -m gangline run SCRIPT. Processes that the script starts do the same.
    """
    from gangline.collectives.torch_backend.gloo_replacement import REPLACE_GLOO, replace_gloo

    script = arguments[0]
    if not module and not Path(script).exists():
        raise UsageError(f"{script} is not a file; expected a Python file, or -m and the name of a module")
    if not module and Path(script).is_dir() and not (Path(script) / "__main__.py").exists():
        raise UsageError(f"{script} is a folder without __main__.py; expected a Python file")
    if module:
        sys.path.insert(0, str(Path.cwd()))
        if find_spec(script.partition(".")[0]) is None:
            raise UsageError(f"there is no module {script}; expected one in this folder or an installed one")
    os.environ[REPLACE_GLOO] = "1"  # for child processes
    replace_gloo()
    sys.argv[:] = arguments
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  of the script: shown as Python does, without the frames above it
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            frames = frames.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(frames), frames
        sys.excepthook(type(error), error, frames)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None
