"""The measurement of many workers and keys runs."""

from __future__ import annotations

import sys

import pytest

from tests.kvstore.parameter_server import growth


@pytest.mark.slow
def test_growth(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["growth", "3,2"])
    growth.main()
    assert capsys.readouterr().out.startswith("3 workers, 2 keys: round ")
