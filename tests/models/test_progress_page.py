"""Progress page: its numbers, when it is written, resumed runs, and its charts."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import threading
from contextlib import nullcontext
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import labelled, mlp
from torch import nn

from gangline import Context, Module, cpu, spawn, split_batch
from gangline.callback import Checkpoint, Speedometer
from gangline.collectives.communicator import Communicator
from gangline.kvstore import create
from gangline.models.loop.callbacks import BatchEndParam
from gangline.models.reports import record as records
from gangline.models.reports.page import FORMAT, TrainingProgress, drawn, read_progress
from gangline.models.reports.record import Point, Record, Split, Validation

SIX = 1e-5  # as six digits show it
RATE = {"learning_rate": 0.1, "momentum": 0.9}
network = partial(mlp, 4, 8, 3, seed=3, dtype=torch.float32)


def arrays(samples: int = 20, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return labelled(samples, 4, 3, seed=seed)


def module_on(loads: list[float], store: Any = "local") -> Module:
    module = Module(network(), nn.CrossEntropyLoss(), [cpu(place) for place in range(len(loads))], loads)
    module.init_optimizer(store, "sgd", RATE)
    return module


def fit(module: Module, report: Any, *others: Any, epochs: int = 3, **options: Any) -> None:
    """Train on batches of 8, 8 and 4 samples; ``others`` are called before the report's own callback."""
    request = module.optimizer_request
    assert request is not None
    settings: dict[str, Any] = dict(zip(("kvstore", "optimizer", "optimizer_params"), request, strict=True))
    callbacks = [*others, report]
    settings |= {"batch_end_callback": callbacks, "epoch_end_callback": report, "eval_end_callback": report}
    settings |= {"num_epoch": epochs, "batch_size": 8}
    module.fit(arrays(), **{**settings, **options})


def page_of(folder: Path, *others: Any, every_seconds: float = 2.0, title: str = "", **options: Any) -> Any:
    """Train two contexts with a page, see `fit`, and return the data of the page."""
    with module_on([1, 1]) as module:
        fit(module, TrainingProgress(module, folder / "page.html", every_seconds, title), *others, **options)
    return read_progress(folder / "page.html")


# -- contents of the page --------------------------------------------------------------------------------------------


def test_each_update_of_a_run_is_a_point_with_its_own_numbers(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    updates: list[tuple[float, float, float, int]] = []
    validations: list[list[tuple[str, float]]] = []

    def look(param: BatchEndParam) -> None:
        label = param.locals["label"]
        accuracy = float((module.get_outputs().argmax(1) == label).double().mean())
        updates.append((float(module.get_loss()), accuracy, module.learning_rate, len(label)))

    def slower(epoch: int, *_: Any) -> None:
        module.set_learning_rate(0.1 / (epoch + 2))

    with module_on([3, 1]) as module:
        progress = TrainingProgress(module, path)
        fit(
            module,
            progress,
            look,
            eval_data=arrays(12, seed=2),
            validation_metric=["acc", "loss"],
            epoch_end_callback=[progress, slower],
            eval_end_callback=[progress, lambda param: validations.append(param.eval_metric.get_global_name_value())],
        )
        waited = module.seconds_waiting
    losses, accuracies, rates, sizes = map(list, zip(*updates, strict=True))
    data = read_progress(path)
    points = data["points"]
    assert points["step"] == list(range(1, 10))
    assert points["epoch"] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert points["loss"] == points["loss_min"] == points["loss_max"] == pytest.approx(losses, rel=SIX)
    assert points["metrics"] == {"accuracy": pytest.approx(accuracies, rel=SIX)}
    assert points["learning_rate"] == pytest.approx(rates, rel=SIX)
    assert points["updates"] == [1] * 9
    shares = [[part.stop - part.start for part in split_batch(size, [3, 1])] for size in sizes]
    shares[0] = [0, 0]  # the time of a run's first update is not that of a step
    assert list(points["samples"].items()) == [("cpu(0)", [a for a, _ in shares]), ("cpu(1)", [b for _, b in shares])]
    assert points["total"] == [0, *sizes[1:]]
    assert points["seconds"][0] == points["waiting"][0] == 0
    assert all(0 < w < s for w, s in zip(points["waiting"][1:], points["seconds"][1:], strict=True))
    assert sum(points["waiting"]) <= waited * (1 + 1e-5)
    assert points["time"] == sorted(points["time"])
    assert sum(points["seconds"]) <= data["elapsed"] + 1e-3
    assert [list(one["values"].items()) for one in data["validations"]] == [
        [(name, pytest.approx(value, rel=SIX)) for name, value in values] for values in validations
    ]
    assert [(one["epoch"], one["step"]) for one in data["validations"]] == [(0, 3), (1, 6), (2, 9)]
    for name, best in (("accuracy", max), ("loss", min)):
        values = [dict(one)[name] for one in validations]
        assert data["best"][name]["epoch"] == values.index(best(values))
    assert (data["format"], data["state"], data["title"]) == (FORMAT, "ended", "Sequential")
    assert data["now"] == {"epoch": 2, "batch": 3, "batches": 3}
    assert data["settings"] == {
        "network": "Sequential, 67 parameters",
        "loss": "CrossEntropyLoss",
        "contexts": "cpu(0), cpu(1)",
        "loads": "3, 1",
        "store": "local",
        "optimizer": "sgd, learning_rate 0.1, momentum 0.9",
        "batch size": "8",
        "samples": "20",
        "PyTorch": torch.__version__,
    }


@pytest.mark.parametrize(
    ("loads", "contexts", "options", "samples"),
    [
        ([1, 1], [cpu(0), cpu(1)], {"accumulate": 2}, {"cpu(0)": [0, 2, 8, 2, 8, 2], "cpu(1)": [0, 2, 8, 2, 8, 2]}),
        ([1, 1], [cpu(0), cpu(1)], {"batch_size": 20}, {"cpu(0)": [0, 10, 10], "cpu(1)": [0, 10, 10]}),
        (
            [1, 1, 0],
            [cpu(0), cpu(0), cpu(1)],
            {"epochs": 1},
            {"cpu(0) #1": [0, 4, 2], "cpu(0) #2": [0, 4, 2], "cpu(1)": [0, 0, 0]},
        ),
    ],
    ids=["several batches an update", "epochs of one batch", "contexts of one name"],
)
def test_samples_are_counted_for_each_context_and_update(
    tmp_path: Path, loads: list[float], contexts: list[Context], options: dict[str, Any], samples: dict[str, list[int]]
) -> None:
    with Module(network(), nn.CrossEntropyLoss(), contexts, loads) as module:
        module.init_optimizer("local", "sgd", RATE)
        fit(module, TrainingProgress(module, tmp_path / "page.html"), **options)
    data = read_progress(tmp_path / "page.html")
    assert data["points"]["samples"] == samples
    assert data["points"]["total"] == [sum(parts) for parts in zip(*samples.values(), strict=True)]
    if "accumulate" in options:
        assert data["points"]["step"] == [2, 3, 5, 6, 8, 9]
        assert data["settings"]["batch size"] == "8, 2 batches per update"


def test_the_metric_of_fit_and_of_a_speedometer_count_as_without_a_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gangline")
    found = []
    for name in (None, "page.html"):
        caplog.clear()
        with module_on([1, 1]) as module:
            progress = TrainingProgress(module, tmp_path / name) if name else (lambda *_: None)
            fit(module, progress, Speedometer(8, frequent=1))  # type: ignore[arg-type]
        lines = [re.sub(r"Speed: \S+|Time cost.*", "", line) for line in caplog.messages]
        assert sum("accuracy=" in line for line in lines) == 9
        found.append(lines)
    assert found[0] == found[1]


def test_text_from_outside_stays_text(tmp_path: Path) -> None:
    title = '</script><script>alert("1")</script> @data@ & <b>'
    assert page_of(tmp_path, title=title)["title"] == title
    text = (tmp_path / "page.html").read_text()
    assert text.count("<script") == 1
    assert "<title>&lt;/script&gt;" in text
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)  # it needs no network


# -- when it is written ----------------------------------------------------------------------------------------------


def test_a_page_is_written_at_once_then_when_it_is_due_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    steps: list[tuple[str, int]] = []

    def look(param: BatchEndParam) -> None:
        if path.exists():
            data = read_progress(path)
            steps.append((data["state"], data["points"]["step"][-1]))

    data = page_of(tmp_path, look, every_seconds=3600)
    assert steps == [("running", 1)] * 8
    assert (data["state"], data["points"]["step"][-1]) == ("ended", 9)


def test_readers_always_find_a_complete_page(tmp_path: Path) -> None:
    path, over = tmp_path / "page.html", threading.Event()
    found: list[int] = []

    def keep_reading() -> None:
        while not over.is_set():
            if path.exists():
                found.append(read_progress(path)["points"]["step"][-1])

    reader = threading.Thread(target=keep_reading)
    with module_on([1, 1]) as module:
        progress = TrainingProgress(module, path, every_seconds=0)
        reader.start()
        try:
            fit(module, progress, epochs=8)
        finally:
            over.set()
            reader.join()
    assert found
    assert found == sorted(found)
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


def test_a_disk_that_fails_in_the_middle_costs_the_page_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with module_on([1, 1]) as module:
        progress = TrainingProgress(module, folder / "page.html", every_seconds=0)
        folder.rmdir()
        fit(module, progress)
        assert module.step == 9
    assert len([line for line in caplog.messages if "page.html cannot be written at the moment" in line]) == 1


@pytest.mark.parametrize("ends", ["error", "callback", "all"])
def test_the_page_shows_why_training_ended(tmp_path: Path, ends: str) -> None:
    """An error that the caller is handling is no reason."""

    def end(param: BatchEndParam) -> bool:
        if ends == "error" and param.epoch == 1:
            raise RuntimeError("the power went")
        return ends == "callback" and param.epoch == 1

    with module_on([1, 1]) as module:
        progress = TrainingProgress(module, tmp_path / "page.html", every_seconds=3600)
        try:
            raise ValueError("the caller's own")
        except ValueError:
            with pytest.raises(RuntimeError, match="the power went") if ends == "error" else nullcontext():
                fit(module, progress, end)
    data = read_progress(tmp_path / "page.html")
    assert (data["state"], data["reason"], data["points"]["step"]) == {
        "error": ("stopped", "RuntimeError: the power went", [1, 2, 3]),
        "callback": ("ended", "callback", [1, 2, 3, 4]),
        "all": ("ended", "", list(range(1, 10))),
    }[ends]


# -- resumed runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loads", [[1, 1], [2, 1, 1]])
def test_a_run_resumed_in_mid_epoch_has_one_complete_record(tmp_path: Path, loads: list[float]) -> None:
    path, prefix = tmp_path / "page.html", tmp_path / "net"
    (tmp_path / "whole").mkdir()
    expected = page_of(tmp_path / "whole", eval_data=arrays(), epochs=4)

    def fail(param: BatchEndParam) -> None:
        if param.locals["module"].step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        page_of(tmp_path, fail, Checkpoint(None, prefix), eval_data=arrays())
    before = read_progress(path)
    assert (before["state"], before["reason"], before["points"]["step"][-1]) == ("stopped", "KeyboardInterrupt", 7)
    with module_on(loads) as module:
        fit(module, TrainingProgress(module, path), eval_data=arrays(), epochs=4, resume=str(prefix))
    data = read_progress(path)
    assert data["state"] == "ended"
    points, whole = data["points"], expected["points"]
    for name in ("step", "epoch", "learning_rate", "updates"):
        assert points[name] == whole[name]
    assert points["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert points["metrics"]["accuracy"] == pytest.approx(whole["metrics"]["accuracy"], rel=1e-4)
    assert [(v["step"], v["epoch"]) for v in data["validations"]] == [(3, 0), (6, 1), (9, 2), (12, 3)]
    assert points["time"] == sorted(points["time"])
    assert points["time"][:7] == before["points"]["time"]
    assert list(points["samples"]) == [f"cpu({place})" for place in range(len(loads))]
    assert {len(column) for column in points["samples"].values()} == {12}


def test_records_after_the_checkpoint_are_replaced(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    page_of(tmp_path, Checkpoint(None, prefix), eval_data=arrays())
    data = page_of(tmp_path, epochs=2, eval_data=arrays(), resume=(prefix, 0))
    assert data["points"]["step"] == [1, 2, 3, 4, 5, 6]
    assert [v["step"] for v in data["validations"]] == [3, 6]


def test_a_second_fit_continues_the_page_and_a_new_run_overwrites_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with module_on([1, 1]) as module:
        progress = TrainingProgress(module, tmp_path / "page.html")
        fit(module, progress, epochs=1)
        fit(module, progress, epochs=3, begin_epoch=1)
    assert read_progress(tmp_path / "page.html")["points"]["step"] == list(range(1, 10))
    assert page_of(tmp_path, epochs=1)["points"]["step"] == [1, 2, 3]
    assert [line for line in caplog.messages if "page.html" in line] == [
        f"{tmp_path / 'page.html'} held 9 batches of an earlier run; this new run overwrites it"
    ]


SCRIPT = '<script type="application/json" id="data">'
FOREIGN = r"page\.html exists and is not a training progress page of gangline"


def test_a_page_of_somebody_elses_or_a_damaged_one_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    damaged = re.sub('"waiting":[^]]*],', "", drawn(data_of(Record([point(1)]), "ended")))
    texts = [
        "<html>a page of somebody's</html>",
        "",
        f'{SCRIPT}{{"format": "another"}}</script>',
        f"{SCRIPT}[1]</script>",
    ]
    for content, message in (
        *((text.encode(), FOREIGN) for text in texts),
        (b"\xff\xfe\x00", FOREIGN),
        (damaged.encode(), r"page\.html are invalid, KeyError\('waiting'\)"),
    ):
        path.write_bytes(content)
        with module_on([1, 1]) as module, pytest.raises(ValueError, match=message):
            TrainingProgress(module, path)
        assert path.read_bytes() == content


def test_a_path_that_cannot_be_written_fails_before_training(tmp_path: Path) -> None:
    error: type[Exception]
    for path, seconds, error, message in (
        ("", 2.0, ValueError, "is a folder; expected the path of a page"),
        ("/proc/nowhere/a.html", 2.0, OSError, r"the page /proc/nowhere/a\.html cannot be written"),
        ("/proc/a.html", 2.0, OSError, r"the page /proc/a\.html cannot be written"),
        ("a.html", math.nan, ValueError, "every_seconds is nan"),
    ):
        with module_on([1, 1]) as module, pytest.raises(error, match=message):
            TrainingProgress(module, tmp_path / path, seconds)
    assert not list(tmp_path.iterdir())


# -- the record ------------------------------------------------------------------------------------------------------


def point(step: int, loss: float | None = 1.0, **more: Any) -> Point:
    values = {"metrics": {"accuracy": 0.5}, "samples": {"cpu(0)": 3, "cpu(1)": 1}, **more}
    return Point(
        step, step // 10, step / 2, 1, loss, loss, loss, values.pop("metrics"), 0.1, 0.5, 0.25, **values, total=4
    )


def test_a_long_run_keeps_few_points_that_reach_to_its_end() -> None:
    record, step = Record(), 0
    while step < 50_000:
        step = min(step + record.per_point, 50_000)
        record.add(point(step))
        assert len(record.points) < records.MOST_POINTS
    assert len(record.points) >= records.MOST_POINTS // 2
    assert record.per_point == 32
    steps = [one.step for one in record.points]
    assert steps[-1] == 50_000
    assert {later - earlier for earlier, later in itertools.pairwise([0, *steps[:-1]])} == {32}


def test_many_validations_are_thinned_out_but_for_the_best() -> None:
    record = Record()
    for epoch in range(10_000):
        record.add_validation(Validation(epoch + 1, epoch, 1.0, {"accuracy": 0.9 if epoch == 2 else 0.1, "loss": 1.0}))
        record.add_split(Split(epoch, [0.5, 0.5], [1.0 if epoch % 2 else 0.5]))
    assert len(record.validations) < records.MOST_POINTS
    assert len(record.splits) < records.MOST_POINTS
    assert (record.splits[0].step, record.splits[-1].step) == (0, 9_999)
    assert record.best()["accuracy"].epoch == 2
    assert record.best()["loss"].epoch == 0
    assert record.validations[-1].epoch == 9_999


def test_a_record_can_be_restored_from_its_data() -> None:
    points = [point(1, None, metrics={}), point(2, math.nan), point(3, math.inf, samples={"gpu(0)": 7})]
    validations = [Validation(4, 0, 3.25, {"accuracy": 0.5, "loss": math.nan})]
    splits = [Split(0, [0.5, 0.5], [1.0]), Split(3, [0.75, 0.25], [0.6, 0.4])]
    record = Record(points, per_point=4, validations=validations, splits=splits)
    data = json.loads(json.dumps(record.data(), allow_nan=False))
    assert data["points"]["loss"] == [None, "nan", "inf"]
    assert data["points"]["metrics"] == {"accuracy": [None, 0.5, 0.5]}
    assert data["points"]["samples"] == {"cpu(0)": [3, 3, 0], "cpu(1)": [1, 1, 0], "gpu(0)": [0, 0, 7]}
    assert list(data["best"]) == ["accuracy"]
    again = Record.from_data(data)
    assert again.data() == data
    assert [one.loss for one in again.points] == [None, pytest.approx(math.nan, nan_ok=True), math.inf]
    assert again.splits == record.splits
    again.go_back_to(3)
    assert again.splits == record.splits[:1]
    del data["splits"]  # as in an older page
    assert Record.from_data(data).splits == []


# -- several workers -------------------------------------------------------------------------------------------------


def in_a_job(comm: Communicator, folder: str) -> tuple[list[str], float]:
    with create("allreduce", communicator=comm) as store, module_on([1], store) as module:
        fit(module, TrainingProgress(module, Path(folder, f"{comm.rank}.html")), epochs=2, eval_data=arrays(12, seed=2))
        [(_, accuracy)] = module.score(arrays(12, seed=2), batch_size=8)
        return sorted(path.name for path in Path(folder).glob("*")), accuracy


@pytest.mark.slow
def test_in_a_job_rank_0_alone_writes_and_counts_the_samples_of_all(tmp_path: Path) -> None:
    [(_, accuracy), (_, same)] = spawn(in_a_job, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["0.html"]
    data = read_progress(tmp_path / "0.html")
    assert data["points"]["total"] == [0, 8, 4, 8, 8, 4]
    assert data["points"]["samples"] == {"cpu(0)": [0, 4, 2, 4, 4, 2]}
    assert data["validations"][-1]["values"] == {"accuracy": pytest.approx(accuracy, rel=SIX)}
    assert accuracy == same
    assert all(waiting > 0 for waiting in data["points"]["waiting"][1:])
    assert data["settings"]["workers"].startswith("2; ")


# -- charts ----------------------------------------------------------------------------------------------------------


class Drawn(HTMLParser):
    """A page: the lines of each chart by their names, and the texts of its tables' rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
        self.rows: dict[str, str] = {}
        self._tag, self._heading, self._points = "", "", ""
        self._cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        if tag == "tr":
            self._cells = []
        if tag == "svg":
            self.curves[self._heading] = {}
        if tag == "polyline":
            self._points = dict(attrs)["points"] or ""

    def handle_data(self, data: str) -> None:
        if self._tag == "h2":
            self._heading = data
        if self._tag == "title" and self._points:
            spots = [tuple(map(float, point.split(","))) for point in self._points.split()]
            self.curves[self._heading][data] = spots  # type: ignore[assignment]
        if self._tag == "td":
            self._cells.append(data)
            self.rows[self._cells[0]] = "".join(self._cells[1:])


def test_the_page_draws_every_curve(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with module_on([3, 1]) as module:
        progress = TrainingProgress(module, path, title="<i>one</i> & two")
        fit(module, progress, eval_data=arrays(), validation_metric=["acc", "loss"], epochs=4)
    text, data = path.read_text(), read_progress(path)
    shown = Drawn(text)
    assert {chart: list(curves) for chart, curves in shown.curves.items()} == {
        "accuracy": ["each batch", "smoothed", "validation"],
        "loss": ["each batch", "smoothed", "validation"],
        "throughput": ["all", "cpu(0)", "cpu(1)"],
        "time waiting for the store": ["waiting"],
        "learning rate": ["learning rate"],
    }
    losses = shown.curves["loss"]["each batch"]
    assert len(losses) == 12
    assert [x for x, _ in losses] == sorted(x for x, _ in losses)
    order = sorted(range(12), key=lambda place: data["points"]["loss"][place])
    heights = [losses[place][1] for place in order]
    assert heights == sorted(heights, reverse=True)  # larger values are nearer to the top
    assert len(shown.curves["accuracy"]["validation"]) == 4
    assert len(shown.curves["throughput"]["all"]) == 11  # the first update has no time of its own
    assert "<h1>&lt;i&gt;one&lt;/i&gt; &amp; two</h1>" in text
    assert shown.rows["state"] == "ended"
    best = data["best"]["accuracy"]
    assert shown.rows["validation accuracy"].endswith(f"best {best['value']:.1%} in epoch {best['epoch']}")
    assert shown.rows["store"] == "local"


def data_of(record: Record, state: str, **more: Any) -> dict[str, Any]:
    data = {"format": FORMAT, "title": "", "state": state, "reason": "", "elapsed": 1, "written": 1.0}
    data |= {"every_seconds": 1, "settings": {}, "now": {"epoch": 0, "batch": 8, "batches": None}}
    return {**data, **more, **record.data()}


def test_unusual_records_are_drawn() -> None:
    record = Record([point(step, math.nan if step > 5 else 10.0**-step) for step in range(1, 9)], per_point=2)
    for step, loads in [(0, [0.5, 0.5]), (3, [0.75, 0.25]), (5, [0.75, 0.25])]:
        record.add_split(Split(step, loads, [1.0]))
    shown = Drawn(drawn(data_of(record, "stopped", reason="OSError: <disk>")))
    assert list(shown.curves["loss"]) == ["batches", "smoothed", "minimum", "maximum"]
    assert len(shown.curves["loss"]["batches"]) == 5
    assert list(shown.curves["split over the workers"]) == ["worker 0", "worker 1"]
    assert len(shown.curves) == 6
    assert shown.rows["training loss"] == "nan"
    assert shown.rows["state"] == "stopped: OSError: <disk>"
    for state in ("running", "ended", "stopped"):
        page = drawn(data_of(Record([point(1)]), state, every_seconds=7))
        assert len(Drawn(page).curves) == 5
        assert ('http-equiv="refresh" content="7"' in page) == (state == "running")
