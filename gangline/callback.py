"""Callbacks for `Module.fit`: checkpoints, logs, progress pages and reasons to stop."""

from __future__ import annotations

from gangline.models.loop.callbacks import Checkpoint as Checkpoint
from gangline.models.loop.callbacks import ProgressBar as ProgressBar
from gangline.models.loop.callbacks import Speedometer as Speedometer
from gangline.models.loop.callbacks import do_checkpoint as do_checkpoint
from gangline.models.loop.callbacks import module_checkpoint as module_checkpoint
from gangline.models.loop.stopping import EarlyStopping as EarlyStopping
from gangline.models.loop.stopping import stop_on as stop_on
from gangline.models.reports.page import TrainingProgress as TrainingProgress
from gangline.models.reports.page import read_progress as read_progress
