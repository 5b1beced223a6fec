"""Keeps torch.compile out of gangline's calls."""

from __future__ import annotations

import inspect

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy


def run_eagerly(cls: type) -> type:
    """Class decorator: keep torch.compile from tracing the functions of a class and all that they call.

    Dynamo compiles each Python function that compiled code calls, C++ between them or not. It sees a process group as
    an opaque object, of which it refuses to read attributes, and it raises if a second pass over a function takes
    another branch, because another thread has ended the call in between.
    """
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function):
            function._torchdynamo_disable = True  # type: ignore[attr-defined]  # not inlined in compiled callers
            function._torchdynamo_disable_msg = "gangline runs eagerly"  # type: ignore[attr-defined]
            set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return cls
