"""Sources of batches: every kind of source, its order, starting in mid-epoch; digits."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from gangline.models.data import sources
from gangline.models.data.batches import as_batch, concat
from gangline.models.data.datasets import digits, raw_digits, synthetic
from gangline.models.data.sources import Source, source
from gangline.models.elastic_workers import ElasticWorkers
from gangline.models.workers import Workers

SAMPLES = 10
Items = list[tuple[Any, Any]]


def arrays(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample i holds (i, i / 10) and the label i."""
    return torch.stack([torch.arange(samples) * 1.0, torch.arange(samples) / 10], 1), torch.arange(samples)


class Counted(Dataset[tuple[torch.Tensor, int]]):
    """Dataset with the samples of `arrays`; records which were read."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read.append(index)
        return torch.tensor([index * 1.0, index / 10]), index


class ByIndex:
    """The samples of `Counted` in a class that is no torch Dataset, as those of Hugging Face."""

    __len__, __getitem__ = Counted.__len__, Counted.__getitem__

    def __init__(self) -> None:
        self.samples, self.read = SAMPLES, []


class Stream(IterableDataset[Any]):
    """Iterable dataset of the same samples, or of batches of ``batch``; it has no length."""

    def __init__(self, batch: int | None = None) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        data, label = arrays()
        step = self.batch or 1
        for start in range(0, SAMPLES, step):
            where = slice(start, start + step) if self.batch else start
            yield data[where], label[where]


def in_order(batch_size: int = 4) -> Items:
    data, label = arrays()
    return list(zip(data.split(batch_size), label.split(batch_size), strict=True))


def labels_of(items: Iterator[tuple[Any, Any]] | Items) -> list[list[int]]:
    """Return the labels by batch; check that each sample's data belong to its label."""
    found = []
    for data, label in items:
        assert torch.equal(data, torch.stack([label * 1.0, label / 10], 1))
        found.append(label.tolist())
    return found


def flat(batches: list[list[int]]) -> list[int]:
    return [label for batch in batches for label in batch]


ORDERED = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# -- arrays and datasets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [arrays, Counted, ByIndex])
def test_batches_have_the_size_asked_for_but_the_last_and_keep_the_order_without_shuffle(
    data: Callable[[], Any],
) -> None:
    assert labels_of(source(data(), 4, shuffle=False, seed=0).epoch(7)) == ORDERED
    for batch_size, sizes in ((3, [3, 3, 3, 1]), (5, [5, 5]), (11, [10])):
        batches = source(data(), batch_size, shuffle=True, seed=0)
        assert [len(batch) for batch in labels_of(batches.epoch(0))] == sizes
        assert batches.num_batches() == len(sizes)


def test_an_epoch_is_a_permutation_by_seed_and_epoch_alone_for_arrays_and_datasets_alike() -> None:
    seen = {}
    for seed, epoch in itertools.product((0, 1), (0, 1, 2)):
        order = flat(labels_of(source(arrays(), 4, shuffle=True, seed=seed).epoch(epoch)))
        assert sorted(order) == list(range(SAMPLES))
        seen[seed, epoch] = tuple(order)
        for data in (arrays, Counted):
            torch.manual_seed(123)
            np.random.seed(5)
            again = source(data(), 3, shuffle=True, seed=seed)
            labels_of(again.epoch(9))
            assert flat(labels_of(again.epoch(epoch))) == order
    assert len(set(seen.values())) == 6


@pytest.mark.parametrize(("ahead", "threads"), [(0, {"gangline-gather_0"}), (1 << 20, {"MainThread"})])
def test_only_large_shuffled_batches_are_gathered_by_a_thread(
    ahead: int, threads: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names, expected = set[str](), list(source(arrays(), 4, shuffle=True, seed=5).epoch(1, 1))
    take = sources.take

    def noted(batch: Any, index: Any) -> Any:
        names.add(threading.current_thread().name)
        return take(batch, index)

    monkeypatch.setattr(sources, "_GATHERED_AHEAD", ahead)
    monkeypatch.setattr(sources, "take", noted)
    batches = source(arrays(), 4, shuffle=True, seed=5)
    assert batches.reads_ahead == (not ahead)
    for (data, label), (theirs, their_label) in zip(batches.epoch(1, 1), expected, strict=True):
        assert torch.equal(data, theirs)
        assert torch.equal(label, their_label)
    assert names == threads
    assert len(list(zip(batches.epoch(1), range(1), strict=False))) == 1  # an epoch that is left ends its thread
    assert not source(arrays(), 4, shuffle=False, seed=5).reads_ahead


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none here")
@pytest.mark.parametrize("data", [arrays, Counted])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_for_a_gpu_are_pinned(data: Callable[[], Any], shuffle: bool) -> None:
    for batch, label in source(data(), 4, shuffle=shuffle, seed=0, pin=True).epoch(0):
        assert batch.is_pinned()
        assert label.is_pinned()


def test_dicts_of_arrays_are_cut_together() -> None:
    data, label = arrays()
    nested = {"left": data.numpy(), "right": {"deep": data * 2}}
    for epoch in (0, 1):
        for batch, target in source((nested, {"y": label}), 4, shuffle=True, seed=1).epoch(epoch):
            assert torch.equal(batch["left"][:, 0].long(), target["y"])
            assert torch.equal(batch["right"]["deep"], batch["left"] * 2)


def test_arrays_become_tensors_that_share_their_memory_if_torch_can_write_it() -> None:
    data, label = arrays()
    for part, _ in source((data, label), 4, shuffle=False, seed=0).epoch(0):
        part.zero_()
    assert not data.any()
    array, tensor, fixed = np.arange(6.0).reshape(3, 2), torch.ones(2), np.arange(4)
    fixed.flags.writeable = False
    batch = as_batch({"a": (array, tensor), "fixed": fixed, "backwards": np.arange(4)[::-1]}, "data")
    assert isinstance(batch["a"], tuple)
    assert batch["a"][1] is tensor
    array[1, 1] = 50
    assert batch["a"][0].dtype == torch.float64
    assert batch["a"][0][1, 1] == 50
    batch["fixed"][0] = 9
    assert fixed[0] == 0
    assert torch.equal(batch["backwards"], torch.tensor([3, 2, 1, 0]))


def test_numbers_without_axes_are_stacked() -> None:
    parts = [{"loss": torch.tensor(float(i)), "out": (torch.full((i + 1,), i),)} for i in range(3)]
    joined = concat(parts, torch.device("cpu"))
    assert torch.equal(joined["loss"], torch.tensor([0.0, 1.0, 2.0]))
    assert torch.equal(joined["out"][0], torch.tensor([0, 1, 1, 2, 2, 2]))
    assert torch.equal(concat([torch.tensor(4.0)], torch.device("cpu")), torch.tensor([4.0]))


def test_data_alone_serves_where_no_labels_are_needed() -> None:
    data, _ = arrays()
    given: Any
    for given in (data, data.numpy(), (data, None)):
        found = list(source(given, 4, shuffle=False, seed=0, labels=False).epoch(0))
        assert [label for _, label in found] == [None] * 3
        assert torch.equal(torch.cat([batch for batch, _ in found]), data)
    found = list(source([data[:4], {"x": data[4:]}], None, shuffle=False, seed=0).epoch(0))  # batches already
    assert torch.equal(found[0][0], data[:4])
    assert torch.equal(found[1][0]["x"], data[4:])
    assert [label for _, label in found] == [None, None]


# -- data that are batches already ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected", "count"),
    [
        (in_order(), ORDERED, 3),
        ([[arrays()[0][:7].numpy(), arrays()[1][:7].numpy()], (arrays()[0][7:], arrays()[1][7:])],
         [list(range(7)), [7, 8, 9]], 2),
        (Stream(4), ORDERED, None),
        (DataLoader(Stream(), batch_size=4), ORDERED, None),
        (DataLoader(Stream(4), batch_size=None), ORDERED, None),
        (DataLoader(Counted(), batch_size=4, drop_last=True), ORDERED[:2], 2),
    ],
    ids=["list", "arrays of any size", "iterable dataset", "loader of one", "loader without batching", "loader"],
)  # fmt: skip
def test_batches_serve_every_epoch_as_they_are(data: Any, expected: list[list[int]], count: int | None) -> None:
    batches = source(data, None, shuffle=True, seed=0)
    assert [labels_of(batches.epoch(epoch)) for epoch in (0, 1)] == [expected, expected]
    assert batches.num_batches() == count
    assert batches.can_skip == (isinstance(data, DataLoader) and isinstance(data.dataset, Counted))
    assert batches.generator is None


def test_a_loaders_own_generator_is_known() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Counted(), batch_size=4, shuffle=True, generator=generator)
    batches = source(loader, None, shuffle=False, seed=0)
    assert batches.generator is generator
    epochs = [flat(labels_of(batches.epoch(epoch))) for epoch in range(2)]
    generator.manual_seed(3)
    assert [flat(batch.tolist() for _, batch in loader) for _ in range(2)] == epochs
    assert all(sorted(order) == list(range(SAMPLES)) for order in epochs)


def test_a_generator_serves_one_epoch_and_a_second_is_refused() -> None:
    batches = source(iter(in_order()), None, shuffle=False, seed=0)
    assert batches.num_batches() is None
    assert labels_of(batches.epoch(0)) == ORDERED
    with pytest.raises(ValueError, match="train_data is an iterator, which yields its batches once"):
        next(batches.epoch(1))


# -- samplers with set_epoch ----------------------------------------------------------------------------------------


class ByEpoch(BatchSampler):
    """Batch sampler that begins epoch e with sample e."""

    def __init__(self) -> None:
        super().__init__(range(SAMPLES), 4, False)
        self.first = -1

    def set_epoch(self, epoch: int) -> None:
        self.first = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = [(self.first + i) % SAMPLES for i in range(SAMPLES)]
        yield from (order[:4], order[4:8], order[8:])


def test_the_epoch_of_a_sampler_or_a_batch_sampler_is_set() -> None:
    dataset = Counted()
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=1)
    batches = source(DataLoader(dataset, batch_size=4, sampler=sampler), None, shuffle=False, seed=0)
    orders = [labels_of(batches.epoch(epoch)) for epoch in (0, 1)]
    assert orders[0] != orders[1]
    assert labels_of(batches.epoch(0, skip=1)) == orders[0][1:]
    batches = source(DataLoader(Counted(), batch_sampler=ByEpoch()), None, shuffle=False, seed=0)
    assert labels_of(batches.epoch(3)) == [[3, 4, 5, 6], [7, 8, 9, 0], [1, 2]]
    assert labels_of(batches.epoch(5, skip=2)) == [[3, 4]]


# -- starting in mid-epoch ------------------------------------------------------------------------------------------


def shuffled_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Counted(), batch_size=3, shuffle=True, **options)


SKIPPING: dict[str, Callable[[], Source]] = {
    "arrays": lambda: source(arrays(), 3, shuffle=True, seed=2),
    "dataset": lambda: source(Counted(), 3, shuffle=True, seed=2),
    "loader": lambda: source(shuffled_loader(), None, shuffle=False, seed=0),
    "loader that drops the last": lambda: source(shuffled_loader(drop_last=True), None, shuffle=False, seed=0),
    "loader with its own generator": lambda: source(
        shuffled_loader(generator=torch.Generator()), None, shuffle=False, seed=0
    ),
    "loader with a batch sampler": lambda: source(
        DataLoader(Counted(), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), 3, False)),
        None,
        shuffle=False,
        seed=0,
    ),
}


@pytest.mark.parametrize("kind", sorted(SKIPPING))
def test_skipping_gives_exactly_the_rest_of_the_epoch(kind: str) -> None:
    batches = SKIPPING[kind]()
    assert batches.can_skip

    def begin() -> None:
        torch.manual_seed(17)
        if batches.generator is not None:
            batches.generator.manual_seed(17)

    begin()
    whole = labels_of(batches.epoch(1))
    for skip in range(len(whole) + 2):
        called: list[int] = []
        begin()
        rest = batches.epoch(1, skip, lambda called=called: called.append(1))
        assert labels_of(rest) == whole[skip:]
        assert called == [1] or not skip


class Changing(ElasticWorkers):
    """Worker of an elastic job whose store gives it these parts of the batches; then it has left."""

    def __init__(self, parts: Sequence[slice]) -> None:
        Workers.__init__(self)
        self.parts = parts

    def share_of(self, position: int, samples: int) -> slice | None:
        assert samples == min(3, SAMPLES - position * 3)
        return self.parts[position] if position < len(self.parts) else None


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_a_worker_whose_parts_change_has_exactly_these_of_each_batch(kind: str) -> None:
    whole = labels_of(SKIPPING[kind]().epoch(0))
    parts = [slice(0, 1), slice(0, 1), slice(1, 3), slice(1, 1)]
    for skip, left_at in itertools.product(range(len(parts)), (3, 4)):
        items = [*SKIPPING[kind]().parts(Changing(parts[:left_at]), 0, skip)]
        found = [[] if item is None else labels_of(iter([item]))[0] for item in items]
        assert found == [batch[part] for batch, part in zip(whole, parts, strict=True)][skip:left_at]


@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_skipped_samples_are_not_read(kind: str) -> None:
    dataset = Counted()
    given, size = (dataset, 3) if kind == "dataset" else (DataLoader(dataset, batch_size=3, shuffle=True), None)
    read_before: list[list[int]] = []
    epoch = source(given, size, shuffle=True, seed=2).epoch(0, 2, lambda: read_before.append(list(dataset.read)))
    assert dataset.read == flat(labels_of(epoch))
    assert read_before == [[]]
    assert len(dataset.read) == 4


# -- wrong input ----------------------------------------------------------------------------------------------------

DATA, LABEL = arrays()


NO_DATA = r"expected \(data, labels\), a Dataset"
NO_SIZE = "train_data holds samples, so batch_size is needed"
OWN_SIZE = "batch_size is 4, but train_data has batches already"
REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    (DATA, 4, TypeError, f"train_data is a Tensor; {NO_DATA}"),
    ({"x": DATA}, 4, TypeError, f"train_data is a dict; {NO_DATA}"),
    (None, 4, TypeError, f"train_data is a NoneType; {NO_DATA}"),
    ((DATA,), 4, ValueError, r"train_data is a tuple of 1; expected \(data, labels\)"),
    ((DATA, LABEL[:9]), 4, ValueError, "train_data has 10 samples, but 9 labels"),
    (({"a": DATA, "b": DATA[:7]}, LABEL), 4, ValueError, r"train_data\[0\] has tensors of shapes"),
    ((DATA, (LABEL, LABEL[:3])), 4, ValueError, r"train_data\[1\] has tensors of shapes"),
    ((DATA[:0], LABEL[:0]), 4, ValueError, r"train_data\[0\] has no samples"),
    ((torch.tensor(1.0), LABEL), 4, ValueError, r"train_data\[0\] has a tensor without axes"),
    ((DATA, list(range(10))), 4, TypeError, r"train_data\[1\]\[0\] is a int"),
    (([[1.0, 2.0]], LABEL), 4, TypeError, r"train_data\[0\]\[0\]\[0\] is a float"),
    ((None, LABEL), 4, TypeError, r"train_data\[0\] is a NoneType"),
    ((np.float64(3), LABEL), 4, TypeError, r"train_data\[0\] is a float64"),
    ((np.array(["text"] * 10), LABEL), 4, TypeError, r"train_data\[0\]"),
    (({}, LABEL), 4, TypeError, r"train_data\[0\] is a dict.* non-empty"),
    (({"a": [DATA, {"b": 2.0}]}, LABEL), 4, TypeError, r"train_data\[0\]\['a'\]\[1\]\['b'\] is a float"),
    (Counted(0), 4, ValueError, "the dataset has no samples"),
    *((data, None, ValueError, NO_SIZE) for data in (arrays(), Counted(), TensorDataset(DATA, LABEL))),
    *((data, 0, ValueError, "batch_size is 0") for data in (arrays(), Counted())),
    *((data, True, TypeError, "batch_size is True") for data in (arrays(), Counted())),
    *((batches, 4, ValueError, OWN_SIZE) for batches in (in_order(), iter(in_order()), Stream(4))),
    *((DataLoader(data, batch_size=4), 4, ValueError, OWN_SIZE) for data in (Counted(), Stream())),
    ([3], None, TypeError, r"a batch of train_data is a int; expected \(data, label\)"),
    ([(DATA, LABEL, LABEL)], None, TypeError, r"a batch of train_data is a tuple; expected \(data, label\)"),
    ([(DATA, 3)], None, TypeError, "a batch of train_data, label, is a int"),
    ([("text", LABEL)], None, TypeError, "a batch of train_data, data, is a str"),
    ([({"x": None}, LABEL)], None, TypeError, r"a batch of train_data, data,\['x'\] is a NoneType"),
]


def test_data_batches_and_batch_sizes_that_do_not_fit_are_refused() -> None:
    for data, batch_size, error, message in REFUSED:
        with pytest.raises(error, match=message):
            next(source(data, batch_size, shuffle=False, seed=0).epoch(0))


# -- digits ---------------------------------------------------------------------------------------------------------


def rows(images: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_digits_are_the_real_images_with_a_stratified_fifth_held_out() -> None:
    splits = digits((1, 28, 28), torch.float64, seed=0)
    (train, train_labels), (held_out, held_out_labels), classes = splits
    assert classes == splits.num_classes == 10
    assert (len(train_labels), len(held_out_labels)) == (1438, 359)
    assert train.shape == (1438, 1, 28, 28)
    assert held_out.shape == (359, 1, 28, 28)
    for images, labels in (splits.train, splits.validation):
        assert images.dtype == torch.float64
        assert labels.dtype == torch.int64
        assert images.min() == 0
        assert images.max() <= 1
    of_class = torch.bincount(raw_digits()[1])
    held = torch.bincount(held_out_labels, minlength=10)
    assert torch.equal(held + torch.bincount(train_labels, minlength=10), of_class)
    assert (held - of_class / 5).abs().max() <= 0.5
    own_size = digits((1, 8, 8), torch.float64, seed=0)  # the pixels as stored
    everything = torch.cat([own_size.train[0], own_size.validation[0]])
    assert rows(everything) == rows(raw_digits()[0].unsqueeze(1).double() / 16)


def test_digits_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"image_shape is \(8, 8\); expected \(channels, height, width\)"):
        digits((8, 8))


def test_the_bundled_digits_are_those_of_scikit_learn() -> None:
    levels, labels = raw_digits()
    assert (levels.shape, levels.dtype, labels.dtype) == ((1797, 8, 8), torch.uint8, torch.int64)
    content = levels.numpy().tobytes() + labels.byte().numpy().tobytes()
    assert hashlib.sha256(content).hexdigest() == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_digits_are_split_by_the_seed() -> None:
    first, again, other = (digits((3, 12, 10), torch.float32, seed) for seed in (0, 0, 1))
    for left, right in zip((*first.train, *first.validation), (*again.train, *again.validation), strict=True):
        assert torch.equal(left, right)
    assert rows(first.validation[0]) != rows(other.validation[0])
    assert not rows(first.train[0]) & rows(first.validation[0])
    images = first.validation[0]  # which repeat their grey in each channel
    assert images.shape == (359, 3, 12, 10)
    assert torch.equal(images, images[:, :1].expand(-1, 3, -1, -1))
    assert images.is_contiguous()


def test_synthetic_data_repeat_by_seed() -> None:
    splits = synthetic((3, 4, 5), torch.float32, 0, samples=50, num_classes=7)
    images, labels = splits.train
    assert images.shape == (50, 3, 4, 5)
    assert set(labels.tolist()) <= set(range(7))
    assert len(splits.validation[0]) == 10
    assert torch.equal(images, synthetic((3, 4, 5), torch.float32, 0, 50, 7).train[0])
    assert not torch.equal(images, synthetic((3, 4, 5), torch.float32, 1, 50, 7).train[0])
