"""Hooks: what collectives need of the folders above them, as imports go down only; `gangline/__init__.py` sets them."""

from __future__ import annotations

from collections.abc import Callable

watch_torch: Callable[[], None]
"""Record what torch does on each device, if a timeline is recorded."""
