"""Ignored labels: whether a loop's losses are means over the labels that count, and not over samples."""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Any

from torch import Tensor
from torch.nn import functional as F

_log = logging.getLogger("gangline")
_CODES = {F.cross_entropy.__code__: "cross_entropy", F.nll_loss.__code__: "nll_loss"}
_BATCHES = 3


def counts_labels(weight: Tensor | None, ignore_index: int, label: Any) -> bool:
    """Return True if a class loss weights these labels, or ignores some."""
    if not isinstance(label, Tensor) or label.is_floating_point():
        return False
    return weight is not None or bool((label == ignore_index).any())


class LabelWatch:
    """Logs a warning if a loss in one of the first batches is not a mean over samples.

    It is a profile function of Python: those of torch would make torch.compile compile once with and once without them.
    """

    def __init__(self, *, is_needed: bool) -> None:
        """Watch nothing if it is not needed."""
        self.left = _BATCHES if is_needed else 0
        """Number of batches to watch."""

    def start(self) -> None:
        """Watch the calls of this thread, unless a profiler does."""
        if self.left and sys.getprofile() is None:
            self.left -= 1
            sys.setprofile(self._see)

    def stop(self) -> None:
        """End watching."""
        if getattr(sys.getprofile(), "__self__", None) is self:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code not in _CODES or not self.left:
            return
        given = frame.f_locals
        if given["reduction"] == "mean" and counts_labels(given["weight"], given["ignore_index"], given["target"]):
            self.left = 0
            _log.warning(
                f"balance: {_CODES[frame.f_code]} ignores or weights labels, so its mean is not over samples, by which "
                "shares are weighted; pass count=, a function from a batch to what the mean is over, such as the "
                "number of labels that are not ignored"
            )
