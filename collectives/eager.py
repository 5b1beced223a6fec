"""Keeps torch.compile out of gangline's calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:  # private names, which a later torch may rename
    set_code_exec_strategy = None  # type: ignore[assignment]


def run_eagerly(cls: type) -> type:
    """Class decorator: keep torch.compile from tracing the functions of a class and all that they call.

    Dynamo compiles each Python function that compiled code calls, C++ between them or not. It sees a process group as
    an opaque object, of which it refuses to read attributes, and it raises if a second pass over a function takes
    another branch, because another thread has ended the call in between.
    """
    for name, member in list(vars(cls).items()):
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function):
            if set_code_exec_strategy is None:
                setattr(cls, name, _disabled(member, function))
                continue
            function._torchdynamo_disable = True  # type: ignore[attr-defined]  # not inlined in compiled callers
            function._torchdynamo_disable_msg = "gangline runs eagerly"  # type: ignore[attr-defined]
            set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return cls


def _disabled(member: Any, function: Callable[..., Any]) -> Any:
    """Return a member of a class by the public function, which costs a frame more in each call."""
    eager = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return property(eager, member.fset, member.fdel, member.__doc__) if isinstance(member, property) else eager
