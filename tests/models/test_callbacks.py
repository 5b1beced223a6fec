"""Callbacks: what they print, when they are called, and their arguments; speed of reading data."""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from measure import labelled, spin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from gangline import Module, cpu
from gangline.callback import ProgressBar, Speedometer
from gangline.models.data.sources import read_speed
from gangline.models.loop.callbacks import BatchEndParam
from gangline.models.metrics.metric import EvalMetric, create

LINE = re.compile(
    r"Epoch\[(?P<epoch>\d+)\] Batch \[(?P<begin>\d+)-(?P<end>\d+)\]\t"
    r"Speed: (?P<speed>\d+\.\d\d) samples/sec\taccuracy=(?P<accuracy>\d\.\d{6})"
)


def arrays(samples: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(samples * 2.0).reshape(samples, 2) / 10, torch.arange(samples) % 3


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def count(metric: EvalMetric, right: int, wrong: int) -> None:
    """Make an accuracy metric that has counted this many samples."""
    label = torch.zeros(right + wrong).long()
    output = torch.eye(2)[torch.arange(right + wrong).ge(right).long()]
    metric.update(label, output, None)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Return matches of the Speedometer's lines so far against MXNet's format."""
    caplog.set_level(logging.INFO, "gangline")

    def matched() -> list[re.Match[str]]:
        found = []
        for record in caplog.records:
            assert (record.name, record.levelno) == ("gangline", logging.INFO)
            if "Speed" in record.getMessage():
                match = LINE.fullmatch(record.getMessage())
                assert match is not None, record.getMessage()
                found.append(match)
        return found

    return matched


def ranges(matches: list[re.Match[str]]) -> list[tuple[int, int, int, float]]:
    """Return (epoch, begin, end, accuracy) of each line."""
    return [(int(one["epoch"]), int(one["begin"]), int(one["end"]), float(one["accuracy"])) for one in matches]


@pytest.mark.parametrize(
    ("options", "counts", "expected"),
    [
        ({"frequent": 50}, [(9, 1)] * 51, [(2, 0, 50, 0.9)]),
        ({"frequent": 5}, [(1, 1)] * 5, []),
        (
            {"frequent": 4},
            [(10, 0)] * 5 + [(0, 10)] * 4 + [(5, 5)] * 4,
            [(2, 0, 4, 1.0), (2, 4, 8, 0.0), (2, 8, 12, 0.5)],
        ),
        (
            {"frequent": 4, "auto_reset": False},
            [(10, 0)] * 5 + [(0, 10)] * 4,
            [(2, 0, 4, 1.0), (2, 0, 8, pytest.approx(5 / 9, abs=1e-6))],
        ),
    ],
    ids=["a line", "no line in between", "with auto_reset", "without auto_reset"],
)
def test_lines_have_mxnets_form_and_tell_of_their_own_batches_or_of_the_epoch_so_far(
    options: dict[str, Any], counts: list[tuple[int, int]], expected: Any, lines: Any
) -> None:
    metric, speedometer = create("acc"), Speedometer(10, **options)
    for batch, (right, wrong) in enumerate(counts):
        count(metric, right, wrong)
        speedometer(BatchEndParam(2, batch, metric))
    assert ranges(lines()) == expected
    ((_, whole),) = metric.get_global_name_value()
    assert whole == pytest.approx(sum(right for right, _ in counts) / sum(map(sum, counts)))


@pytest.mark.parametrize(("frequent", "first", "count_of_lines"), [(3, 0, 2), (10, 7, 1)])
def test_speed_is_samples_by_the_time_since_the_last_line_or_since_a_resumed_epochs_first_call(
    frequent: int, first: int, count_of_lines: int, lines: Any
) -> None:
    """Three batches are before each line."""
    metric, speedometer = create("acc"), Speedometer(32, frequent)
    for epoch in range(2):  # a new epoch starts anew
        spin(0.05)  # validation, say
        began, before = time.perf_counter(), len(lines())
        metric.reset()
        for batch in range(first, first + 3 * count_of_lines + 1):
            count(metric, epoch, 1 - epoch)
            speedometer(BatchEndParam(epoch, batch, metric))
            spin(0.01)
        at_most = 3 * 32 / (3 * 0.01)
        at_least = 3 * 32 / (time.perf_counter() - began)
        speeds = [float(one["speed"]) for one in lines()[before:]]
        assert len(speeds) == count_of_lines
        assert all(at_least - 0.01 <= speed <= at_most + 0.01 for speed in speeds)
        assert {(one, accuracy) for one, _, _, accuracy in ranges(lines()[before:])} == {(epoch, float(epoch))}


def written(text: str) -> list[str]:
    """Return the successive states of the line that the bar rewrites."""
    return [state.strip() for state in text.split("\r") if state.strip()]


def left_over(text: str) -> str:
    """Return what a terminal shows at the end."""
    line = ""
    for state in text.split("\r"):
        line = state + line[len(state) :]
    return line.strip()


def open_bars() -> list[tqdm[Any]]:
    return list(getattr(tqdm, "_instances", ()))


@pytest.fixture
def bar(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProgressBar]:
    """Yield a bar that is redrawn at each call, and close it after the test."""
    monkeypatch.setattr("tqdm.std.time", partial(next, itertools.count(0.0, 0.2)))
    yield ProgressBar(getattr(request, "param", None))
    for one in open_bars():
        one.close()


def show(bar: ProgressBar, batches: Any, epoch: int = 0, **places: Any) -> None:
    """Call the bar for batches."""
    metric = create("acc")
    for batch in batches:
        count(metric, 3, 1)
        bar(BatchEndParam(epoch, batch, metric, places))


@pytest.mark.parametrize(("bar", "places"), [(3, {}), (None, {"num_batches": 3})], indirect=["bar"])
def test_each_epoch_has_a_bar_of_its_total_or_the_datas_that_is_erased_at_its_end(
    capsys: pytest.CaptureFixture[str], bar: ProgressBar, places: dict[str, int]
) -> None:
    for epoch in range(2):
        show(bar, range(2), epoch, **places)
        text = capsys.readouterr().err
        assert all(state.startswith(f"Epoch {epoch}: ") for state in written(text))
        assert "2/3" in left_over(text)
        assert "accuracy=0.75" in left_over(text)
        assert len(open_bars()) == 1
        show(bar, [2], epoch, **places)
        assert left_over(text + capsys.readouterr().err) == ""
        assert open_bars() == []


class Unsized:
    """Batches without a length; each epoch yields them again."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        data, label = arrays()
        yield from zip(data.split(5), label.split(5), strict=True)


@pytest.mark.parametrize("sized", [True, False])
def test_nothing_is_left_of_the_bar_when_fit_is_over(
    capsys: pytest.CaptureFixture[str], bar: ProgressBar, sized: bool
) -> None:
    data, size = (arrays(), 5) if sized else (Unsized(), None)
    with Module(classifier(), nn.CrossEntropyLoss(), cpu()) as module:
        module.fit(data, batch_size=size, num_epoch=2, batch_end_callback=bar)
    text = capsys.readouterr().err
    assert any(state.startswith("Epoch 0: ") for state in written(text))
    assert any(state.startswith("Epoch 1: ") for state in written(text))
    assert left_over(text) == ""
    assert open_bars() == []


def test_a_batch_callback_gets_epoch_and_batch() -> None:
    data, label = arrays()
    seen: list[tuple[int, int]] = []
    values: list[float] = []
    outputs: list[torch.Tensor] = []

    def look(param: BatchEndParam) -> None:
        seen.append((param.epoch, param.nbatch))
        assert param.locals["module"] is module
        assert param.locals["num_batches"] == 3
        where = slice(4 * param.nbatch, 4 * param.nbatch + 4)
        assert torch.equal(param.locals["data"], data[where])
        assert torch.equal(param.locals["label"], label[where])
        outputs.append(module.get_outputs())
        ((name, value),) = param.eval_metric.get_name_value()
        assert name == "accuracy"
        values.append(value)

    with Module(nn.Linear(2, 3), nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.fit((data, label), batch_size=4, shuffle=False, num_epoch=4, begin_epoch=2, batch_end_callback=look)
    assert seen == [(epoch, batch) for epoch in (2, 3) for batch in range(3)]
    for first in (0, 3):  # each epoch's running accuracy
        right = torch.cat(outputs[first : first + 3]).argmax(1) == label
        for batch, samples in enumerate((4, 8, 10)):
            assert values[first + batch] == pytest.approx(right[:samples].double().mean().item(), rel=1e-6)


def test_an_epoch_callback_gets_the_network_and_copies_of_its_parameters_and_buffers() -> None:
    seen, kept = [], []

    def look(epoch: int, network: nn.Module, params: Any, buffers: Any) -> None:
        assert network is module.network
        assert set(params) == {name for name, _ in network.named_parameters()}
        assert set(buffers) == {name for name, _ in network.named_buffers()}
        assert all(torch.equal(value, module.get_params()[name]) for name, value in {**params, **buffers}.items())
        assert buffers["1.num_batches_tracked"] == 3 * (epoch + 1)
        seen.append(epoch)
        kept.append(params["2.bias"])

    with Module(classifier(), nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.fit(arrays(12), batch_size=4, num_epoch=2, epoch_end_callback=look)
    assert seen == [0, 1]
    assert not torch.equal(kept[0], kept[1])


def test_several_callbacks_are_called_in_order() -> None:
    calls: list[str] = []
    options: dict[str, Any] = {
        f"{when}_end_callback": [lambda *_, name=f"{when} {which}": calls.append(name) for which in "ab"]
        for when in ("batch", "epoch", "eval_batch", "eval")
    }
    with Module(nn.Linear(2, 3), nn.CrossEntropyLoss(), cpu()) as module:
        module.fit(arrays(), arrays(), batch_size=5, num_epoch=1, **options)
    names = ["batch", "batch", "epoch", "eval_batch", "eval_batch", "eval"]
    assert calls == [f"{name} {which}" for name in names for which in "ab"]


def test_callbacks_of_scoring_get_epoch_batch_and_metric() -> None:
    data, label = arrays()
    ends, batches = [], []

    def look(param: BatchEndParam) -> None:
        assert param.locals["module"] is module
        assert len(param.locals["label"]) == len(param.locals["data"])
        batches.append((param.epoch, param.nbatch, param.locals["num_batches"], len(param.locals["data"])))

    def end(param: BatchEndParam) -> None:
        assert param.locals["module"] is module
        ends.append((param.epoch, param.nbatch, param.eval_metric.get_name_value()))

    with Module(nn.Linear(2, 3), nn.CrossEntropyLoss(), cpu()) as module:
        module.fit((data, label), (data, label), batch_size=4, num_epoch=2, eval_end_callback=end)
        score = module.score((data, label), batch_size=4, batch_end_callback=look, epoch=7)
        module.score(Unsized(), batch_end_callback=look)
    assert [(epoch, batch) for epoch, batch, _ in ends] == [(0, 2), (1, 2)]
    assert ends[1][2] == score
    assert batches[:3] == [(7, 0, 3, 4), (7, 1, 3, 4), (7, 2, 3, 2)]
    assert [count for _, _, count, _ in batches[3:]] == [None, None]


def test_callbacks_that_are_not_callable_are_refused_before_data_are_read() -> None:
    asked: list[int] = []

    def watched() -> Iterator[Any]:
        asked.append(1)
        yield arrays()

    with Module(nn.Linear(2, 3), nn.CrossEntropyLoss(), cpu()) as module:
        fit = partial(module.fit, watched(), watched(), num_epoch=1)
        for verb, options in (
            (fit, ("batch_end_callback", "epoch_end_callback", "eval_end_callback")),
            (partial(module.score, watched()), ("batch_end_callback", "score_end_callback")),
        ):
            for option, callback in itertools.product(options, (3, [print, None])):
                with pytest.raises(TypeError, match=r"callback is .*; expected a function"):
                    verb(**{option: callback})
    assert asked == []
    with pytest.raises(ValueError, match="frequent is 0; expected 1 or more"):
        Speedometer(10, 0)


# Speed of reading data


labelled_arrays = partial(labelled, 12, 4, 3)


class Reads(TensorDataset):
    def __init__(self) -> None:
        super().__init__(*labelled_arrays())
        self.count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return super().__getitem__(index)


def test_all_samples_are_read_in_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 14.0] * 2)
    monkeypatch.setattr("gangline.models.data.sources.time.perf_counter", lambda: next(times))
    data = Reads()
    assert read_speed(data, batch_size=5, epochs=3) == 36 / 4
    assert data.count == 36
    assert read_speed(DataLoader(data, batch_size=5)) == 12 / 4


def test_invalid_values_are_refused() -> None:
    for function, arguments, message in (
        (read_speed, (labelled_arrays(), 3, 0), "epochs is 0"),
        (read_speed, ([],), "no batches"),
        (read_speed, (labelled_arrays(),), "batch_size is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments)
