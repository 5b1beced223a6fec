"""Log lines on the terminal of programs that have not configured logging."""

from __future__ import annotations

import logging
import sys

import pytest
from tqdm import tqdm

from gangline.models.console_log import log_to_stderr


@pytest.mark.parametrize("has_bar", [True, False])
def test_lines_are_written_above_progress_bars(
    has_bar: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("gangline")
    monkeypatch.setattr(logger, "propagate", False)
    with log_to_stderr():
        if has_bar:
            with tqdm(total=2, file=sys.stderr, ascii=True, mininterval=0) as bar:
                bar.update()
                logger.info("a line")
        else:
            logger.info("a line")
    printed = capsys.readouterr().err
    assert ("\ra line\n\r" in printed) if has_bar else (printed == "a line\n")
    assert not logger.handlers
