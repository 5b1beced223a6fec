"""HTML page with the progress of a run, updated while it trains and kept as its record."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gangline.collectives.host_files import write_text
from gangline.kvstore.optimizer.files import temporary_name
from gangline.models.data.batches import num_samples
from gangline.models.loop.callbacks import BatchEndParam
from gangline.models.metrics.metric import EvalMetric
from gangline.models.reports.chart import Line, Place, line_chart, page, table
from gangline.models.reports.record import Point, Record, Split, Validation

if TYPE_CHECKING:
    from gangline.models.module import Module

FORMAT = "gangline training progress 1"
_DATA_TAG = '<script type="application/json" id="data">'
"""Start of the data in a page; the data end at the next tag."""
_DATA = re.compile(f"{re.escape(_DATA_TAG)}(.*?)</script>", re.DOTALL)
_MAX_WRITING = 0.02  # fraction of the time


class TrainingProgress:
    """Callback of `fit` that writes an HTML page of loss, metrics, learning rate, throughput and waiting time.

    Give it to `fit` as batch_end_callback, epoch_end_callback and eval_end_callback. The page is one file without
    external resources; it reloads itself until training ends. The script element with id "data" holds its numbers as
    JSON. The file is replaced atomically. In a job every worker has a `TrainingProgress`, and rank 0 writes.

    The loss is the one that the step computed. The metric is evaluated on single batches, by a copy of `fit`'s metric.

    A run resumed from a checkpoint continues an existing page from the checkpoint's position; a new run overwrites it.
    """

    def __init__(self, module: Module, path: str | Path, every_seconds: float = 2.0, title: str = "") -> None:
        """Read an existing page.

        Args:
            module: module that `fit` trains.
            path: path of the page, such as "training-progress.html".
            every_seconds: minimum time between two writes; the page is always written when training ends.
            title: title of the page; "": the class of the network.

        Raises:
            ValueError: if ``path`` is a folder or a file of another kind, or ``every_seconds`` is negative or NaN.
            OSError: if its folder cannot be made or written.
        """
        if not every_seconds >= 0:
            raise ValueError(f"every_seconds is {every_seconds!r}; expected a number of seconds, 0 or more")
        self.path, self.every_seconds, self.title = Path(path), every_seconds, title
        self._module = module
        self._metric: EvalMetric | None = None
        self._copied: EvalMetric | None = None  # the original of the copy
        self._is_running = False
        self._since: float | None = None  # the end of the last update
        self._aside = self.path.with_name(temporary_name(self.path.name))
        _check_writable(self.path, self._aside)
        self._record = _record(self.path) if self.path.exists() else Record()
        self._cannot_write = False

    def __call__(self, when: int | BatchEndParam, *_: Any) -> None:
        """Record a batch, a validation or the end of an epoch."""
        if not self._module.workers.is_first:
            return
        if isinstance(when, BatchEndParam) and "data" in when.locals:  # locals of a validation have no data
            if not self._is_running:
                self._begin(when)
            self._count(when)
            self._refresh()
            return
        if isinstance(when, BatchEndParam) and self._is_running:
            values = dict(when.eval_metric.get_global_name_value())
            elapsed = time.perf_counter() - self._begun
            self._record.add_validation(Validation(self._module.step, when.epoch, elapsed, values))
        self._refresh()
        if self._since is not None:  # the time of validations and other callbacks does not count
            self._since = time.perf_counter()

    def close(self) -> None:
        """Record the last updates and write the page; `fit` calls this when it ends."""
        if not self._is_running:
            return
        self._end_point()
        self._is_running = False
        error = sys.exception()
        if error is None or error is self._handled:
            self._write("ended", self._module.workers.stop or "")
        else:
            self._write("stopped", f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    def _begin(self, param: BatchEndParam) -> None:
        """Begin a run with this update; drop records after its step."""
        self._begun = time.perf_counter()
        self._since = None  # the time of a run's first update, which includes set-up, does not count
        self._seen: list[int] = []
        self._waited, self._epoch = 0.0, param.epoch
        self._begin_point()
        step = self._module.step - param.batches
        if step == 0:
            if self._record.points:
                message = "%s held %d batches of an earlier run; this new run overwrites it"
                self._module.logger.warning(message, self.path, self._record.points[-1].step)
            self._record = Record()
        self._record.go_back_to(step)
        self._settings = settings(self._module, param)
        self._begun -= self._record.seconds
        self._due = 0.0
        self._handled = sys.exception()  # already handled by the caller, so not the reason for the end
        self._is_running = True

    def _begin_point(self) -> None:
        self._pending = Point(samples=dict.fromkeys(labels(self._module), 0))  # the updates since the last point
        self._losses: list[torch.Tensor] = []

    def _count(self, param: BatchEndParam) -> None:
        """Add an update; at the last one of a point evaluate the metric on its last batch."""
        now, module = time.perf_counter(), self._module
        split = _shares(module.workers.loads), _shares(module.work_load_list)
        self._record.add_split(Split(module.step - param.batches, *split))
        self._where = {"epoch": param.epoch, "batch": param.nbatch + 1, "batches": param.locals.get("num_batches")}
        seen, waited = module.bound.replicas.samples_seen, module.seconds_waiting
        before = self._seen if param.epoch == self._epoch else [0] * len(seen)  # the counters restart in each epoch
        point = self._pending
        if self._since is not None:
            point.seconds += now - self._since
            point.waiting += waited - self._waited
            names, local = list(point.samples), 0
            for replica, count, was in zip(module.bound.replicas.all, seen, before, strict=True):
                new = count - was if count >= was else count
                point.samples[names[replica.context_index]] += new
                local += new
            point.total += samples_of_job(module, param, local)
        self._since, self._seen, self._waited, self._epoch = now, seen, waited, param.epoch
        point.updates += 1
        is_last = point.updates >= self._record.per_point
        if param.locals.get("data") is not None:  # None: this worker had no samples in the batch
            self._losses.append(module.get_loss())
            if is_last:
                self._measure(param)
        if is_last:
            self._end_point()

    def _measure(self, param: BatchEndParam) -> None:
        if self._copied is not param.eval_metric:
            self._copied, self._metric = param.eval_metric, None
            try:
                self._metric = copy.deepcopy(param.eval_metric)
            except (TypeError, RuntimeError) as error:  # a user's metric may hold objects without copy
                name = type(param.eval_metric).__name__
                message = "%s cannot be copied, so its curve over batches is missing: %s"
                self._module.logger.warning(message, name, error)
        if self._metric is not None:
            self._metric.reset()
            self._metric.update_from(self._module, param.locals.get("label"))
            self._pending.metrics = dict(self._metric.get_global_name_value())

    def _end_point(self) -> None:
        """Add the point of all updates since the last one, if there are any, and begin the next."""
        point = self._pending
        if not point.updates:
            return
        point.step, point.epoch, point.time = self._module.step, self._epoch, time.perf_counter() - self._begun
        point.learning_rate = self._module.learning_rate
        if self._losses:
            losses = torch.stack([loss.double() for loss in self._losses]).tolist()
            point.loss, point.loss_min, point.loss_max = math.fsum(losses) / len(losses), min(losses), max(losses)
        self._begin_point()
        self._record.add(point)

    def _refresh(self) -> None:
        """Write the page if due."""
        if self._is_running and time.perf_counter() >= self._due:
            self._write("running")

    def _write(self, state: str, reason: str = "") -> None:
        began = time.perf_counter()
        self._settings |= _loads(self._module)
        data = {
            "format": FORMAT,
            "title": self.title or type(self._module.network).__name__,
            "state": state,
            "reason": reason,
            "written": round(time.time(), 3),
            "elapsed": round(began - self._begun, 3),
            "every_seconds": self.every_seconds,
            "settings": self._settings,
            "now": self._where,
            **self._record.data(),
        }
        try:
            try:
                write_text(self._aside, drawn(data))
                self._aside.replace(self.path)
            finally:
                self._aside.unlink(missing_ok=True)  # after an error
        except OSError as error:  # a full disk must not stop training
            if not self._cannot_write:
                self._module.logger.warning("the page %s cannot be written at the moment: %s", self.path, error)
            self._cannot_write = True
        now = time.perf_counter()
        self._due = now + max(self.every_seconds, (now - began) / _MAX_WRITING)


def read_progress(path: str | Path) -> dict[str, Any]:
    """Return the data of a page.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not a progress page.
    """
    with contextlib.suppress(ValueError):  # not text, or not JSON
        found = _DATA.search(Path(path).read_text(encoding="utf-8"))
        data = json.loads(found[1]) if found else None
        if isinstance(data, dict) and data.get("format") == FORMAT:
            return data
    raise ValueError(
        f"{path} exists and is not a training progress page of gangline; give another path, or move it away"
    )


def _record(path: Path) -> Record:
    data = read_progress(path)
    try:
        return Record.from_data(data)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the data of the page {path} are invalid, {error!r}; move it away") from error


def labels(module: Module) -> list[str]:
    """Return a unique label for each context of a module."""
    names = [str(context) for context in module.contexts]
    numbers = [f" #{names[: index + 1].count(name)}" * (names.count(name) > 1) for index, name in enumerate(names)]
    return [name + number for name, number in zip(names, numbers, strict=True)]


def samples_of_job(module: Module, param: BatchEndParam, local: int) -> int:
    """Return the number of samples of all workers in an update; ``local`` if it is unknown."""
    plan = module.position.plan
    if module.workers.count == 1 or "samples" not in plan:
        return local
    begins = [number * plan["batch_size"] for number in range(param.nbatch + 1 - param.batches, param.nbatch + 1)]
    return sum(min(plan["batch_size"], plan["samples"] - begin) for begin in begins)


def settings(module: Module, param: BatchEndParam) -> dict[str, str]:
    """Return the settings of a started run, as text by name."""
    workers, plan = module.workers, module.position.plan
    parameters = sum(parameter.numel() for parameter in module.network.parameters())
    trained = sum(parameter.numel() for parameter in module.bound.replicas.first.parameters.values())
    store, optimizer, arguments = module.optimizer_request or (None, "", {})
    data = param.locals["data"]
    size = plan.get("batch_size") or (num_samples(data, "data") if data is not None else None)
    loss = module.loss.loss
    several = f"{workers.count}; loss, training metric, contexts and waiting time are those of worker 0"
    texts = {
        "network": f"{type(module.network).__name__}, {parameters:,} parameters"
        + (f", {trained:,} trained" if trained != parameters else ""),
        "loss": "the network's output" if loss is None else getattr(loss, "__name__", type(loss).__name__),
        "contexts": ", ".join(map(str, module.contexts)),
        **_loads(module),
        "store": str(getattr(store, "type", store)),
        "optimizer": f"{getattr(optimizer, '__name__', optimizer)}, "
        + ", ".join(f"{name} {value}" for name, value in arguments.items()),
        "batch size": f"{size or ''}" + (f", {param.batches} batches per update" if param.batches > 1 else ""),
        "samples": f"{plan['samples']:,}" if "samples" in plan else "",
        "workers": (several + ", throughput too" * ("samples" not in plan)) * (workers.count > 1),
        "PyTorch": torch.__version__,
    }
    return {name: text for name, text in texts.items() if text}


def _loads(module: Module) -> dict[str, str]:
    """Return the current loads and the workers' times in the last epoch."""
    texts = {"loads": _listed(module.work_load_list, is_auto=module.load_balancer is not None)}
    workers = module.workers
    if workers.count > 1:
        texts["loads of the workers"] = _listed(workers.loads, is_auto=workers.is_auto)
        for rank, report in enumerate(module.worker_balance.reports):
            texts[f"worker {rank}, last epoch"] = f"computed {report.computed:.3g} s, waited {report.waited:.3g} s"
    return texts


def _listed(loads: Sequence[float], *, is_auto: bool = False) -> str:
    return ", ".join(f"{load:.3g}" for load in loads) + " (auto)" * is_auto


def _shares(loads: Sequence[float]) -> list[float]:
    """Return the fraction of a batch for each load."""
    return [round(load / sum(loads), 4) for load in loads]


def _check_writable(path: Path, aside: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; expected the path of a page, such as {path / 'training-progress.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(aside, "")
        aside.unlink()
    except OSError as error:
        raise type(error)(f"the page {path} cannot be written: {error.strerror}") from error


def drawn(data: dict[str, Any]) -> str:
    """Return the HTML page with these data of a `TrainingProgress`."""
    state = data["state"] + (f": {data['reason']}" if data["reason"] else "")
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(data["written"]))
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    text = text.replace("<", "\\u003c")  # so that the data cannot close the script tag
    sections = [
        table((), [("state", state), ("updated", written), *_summary(data)]),
        *(f"<h2>{title}</h2>{line_chart(lines, 'batch', unit)}" for title, unit, lines in _charts(data)),
        f"<h2>settings</h2>{table((), list(data['settings'].items()))}{_DATA_TAG}{text}</script>",
    ]
    reload_seconds = max(1, round(data["every_seconds"])) if data["state"] == "running" else None
    return page(f"{data['title']} - training progress", data["title"], sections, reload_seconds=reload_seconds)


def _summary(data: dict[str, Any]) -> list[tuple[str, str]]:
    points, now = data["points"], data["now"]
    batches = f" of {now['batches']}" if now["batches"] else ""
    rows = [
        ("elapsed", str(timedelta(seconds=round(data["elapsed"])))),
        ("epoch", f"{now['epoch']}, batch {now['batch']}{batches}"),
        ("training loss", _text("loss", points["loss"][-1] if points["loss"] else None)),
    ]
    rows += [(f"training {name}", _text(name, values[-1])) for name, values in points["metrics"].items()]
    for name, best in data["best"].items():
        newest = data["validations"][-1]["values"].get(name)
        best_text = f"best {_text(name, best['value'])} in epoch {best['epoch']}"
        rows.append((f"validation {name}", f"{_text(name, newest)}, {best_text}"))
    if seconds := sum(points["seconds"]):
        rows.append(("samples per second", f"{sum(points['total']) / seconds:.4g}"))
        rows.append(("waiting for the store", f"{sum(points['waiting']) / seconds:.1%}"))
    return rows


def _charts(data: dict[str, Any]) -> list[tuple[str, str, list[Line]]]:
    """Return the charts: title, unit and lines of each."""
    points, validations = data["points"], data["validations"]
    steps, seconds = points["step"], points["seconds"]

    def curves(name: str, values: Sequence[Any]) -> list[Line]:
        lines = []
        known = _numbers(steps, values)
        if known:
            lines.append(Line("batches" if data["per_point"] > 1 else "each batch", known, width=0.5))
            lines.append(Line("smoothed", _smoothed(known)))
        at = [validation["step"] for validation in validations]
        validated = _numbers(at, [validation["values"].get(name) for validation in validations])
        return [*lines, Line("validation", validated, has_discs=True)] if validated else lines

    loss = curves("loss", points["loss"])
    if data["per_point"] > 1:
        loss += [Line(name, _numbers(steps, points[f"loss_{name[:3]}"]), width=0.5) for name in ("minimum", "maximum")]
    names = dict.fromkeys([*points["metrics"], *(name for validation in validations for name in validation["values"])])
    charts = [(name, name, curves(name, points["metrics"].get(name, ()))) for name in names if name != "loss"]
    throughput = [Line("all", _rates(steps, points["total"], seconds))]
    if len(points["samples"]) > 1 or "workers" in data["settings"]:
        throughput += [Line(name, _rates(steps, counts, seconds)) for name, counts in points["samples"].items()]
    charts += [
        ("loss", "loss", loss),
        ("throughput", "samples/s", throughput),
        (
            "time waiting for the store",
            "part of the time",
            [Line("waiting", _rates(steps, points["waiting"], seconds))],
        ),
        ("learning rate", "learning rate", [Line("learning rate", _numbers(steps, points["learning_rate"]))]),
    ]
    splits, last = data["splits"], steps[-1] if steps else 0
    for kind, labels in (("workers", ()), ("contexts", list(points["samples"]))):
        shares = [(split["step"], split[kind]) for split in splits]
        if len({tuple(share) for _, share in shares}) > 1:  # the split has moved
            count = min(len(share) for _, share in shares)
            lines = [
                Line(
                    labels[part] if part < len(labels) else f"{kind.removesuffix('s')} {part}",
                    _stepped([(step, share[part]) for step, share in shares], last),
                )
                for part in range(count)
            ]
            charts.append((f"split over the {kind}", "part of a batch", lines))
    return charts


def _numbers(steps: Sequence[int], values: Sequence[Any]) -> list[Place]:
    """Return the points of the values that are finite numbers."""
    return [(step, value) for step, value in zip(steps, values, strict=False) if isinstance(value, (int, float))]


def _smoothed(points: Sequence[Place]) -> list[Place]:
    """Return the exponential mean, corrected for its start."""
    keep = 1 - 1 / (1 + min(20, max(4, len(points) / 150)))
    total = weight = 0.0
    means = []
    for step, value in points:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        means.append((step, total / weight))
    return means


def _rates(steps: Sequence[int], amounts: Sequence[float], seconds: Sequence[float]) -> list[Place]:
    """Return amounts by seconds over a moving window."""
    width = max(1, round(len(steps) / 30))
    windows = [
        (step, sum(amounts[max(0, end - width) : end]), sum(seconds[max(0, end - width) : end]))
        for end, step in enumerate(steps, 1)
    ]
    return [(step, max(0.0, amount / time_spent)) for step, amount, time_spent in windows if time_spent > 1e-9]


def _stepped(points: Sequence[Place], last: float) -> list[Place]:
    """Return a line that keeps each value until the next one, and the last one until the end."""
    corners = [(later, value) for (_, value), (later, _) in zip(points, [*points[1:], (last, 0.0)], strict=True)]
    return [point for pair in zip(points, corners, strict=True) for point in pair]


def _text(name: str, value: float | str | None) -> str:
    if not isinstance(value, (int, float)):
        return str(value or "-")  # such as "nan"
    return f"{value:.1%}" if name.startswith(("accuracy", "top_k_accuracy")) else f"{value:.4g}"
