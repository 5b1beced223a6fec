"""Tests of row-sparse values in stores of one process: push, sum, updaters, optimizers, pull."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gangline.kvstore import KVStore, RowSparse
from tests.collectives.simulated_gpus import counted, simulated_gpus
from tests.kvstore import keyed
from tests.kvstore.keyed import LIMIT, Careless

ROWS, WIDTH = 6, 3

# Every optimizer that works element by element.
OPTIMIZERS = {name: one for name, one in keyed.OPTIMIZERS.items() if name not in ("adafactor", "muon")}
SPARSE_ADAM: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95)}
NAMED = [[1, 4], [4, 0], [1], [], [5, 1, 4]]
"""Rows of each step's gradient; 2 and 3 never occur, 0 and 5 only late."""


def table(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Element i holds (i - 7) / 4."""
    return ((torch.arange(ROWS * WIDTH) - 7) / 4).reshape(ROWS, WIDTH).to(dtype)


def sparse(ids: list[int], first: int = 1) -> RowSparse:
    """Rows of which element j of the i-th holds (first + i) * 10 + j."""
    values = ((torch.arange(len(ids)) + first)[:, None] * 10 + torch.arange(WIDTH)).float()
    return RowSparse(ids, values, (ROWS, WIDTH))


def dense(part: RowSparse) -> torch.Tensor:
    """The whole tensor, added up row by row."""
    return torch.zeros(part.shape, dtype=part.dtype).index_add_(0, part.indices, part.values)


def gradient(step: int, device: int = 0, ids: Sequence[int] | None = None) -> RowSparse:
    """Return sevenths between -5/7 and 5/7 by element, step and device, for the rows of `NAMED` or those given."""
    ids = NAMED[step % len(NAMED)] if ids is None else ids
    numbers = torch.arange(len(ids) * WIDTH).reshape(-1, WIDTH) * 7 + step * 3 + device * 5
    return RowSparse(torch.tensor(ids, dtype=torch.int64), (numbers % 11 - 5).double() / 7, (ROWS, WIDTH))


def pulled(kv: KVStore, key: Any = "w", like: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((ROWS, WIDTH), 99.0) if like is None else torch.full_like(like, 99)
    kv.pull(key, out)
    return out


# -- RowSparse --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "values", "shape", "error", "words"),
    [
        ([0.5], torch.zeros(1, 3), (6, 3), TypeError, "row numbers of torch.float32; expected integers"),
        ([0], np.zeros((1, 3)), (6, 3), TypeError, "the values of a RowSparse are a ndarray; expected a dense tensor"),
        ([0], torch.zeros(1, 3).to_sparse(), (6, 3), TypeError, "a tensor of layout torch.sparse_coo"),
        ([6], torch.zeros(1, 3), (6, 3), ValueError, r"names row 6; expected 0 to 5, as its shape is \(6, 3\)"),
        ([0], torch.zeros(1, 4), (6, 3), ValueError, r"values of shape \(1, 4\); expected \(n,\) and \(n, 3\)"),
        ([0], torch.zeros(2, 3), (6, 3), ValueError, r"indices of shape \(1,\) and values of shape \(2, 3\)"),
        ([[0]], torch.zeros(1, 1, 3), (6, 3), ValueError, r"indices of shape \(1, 1\)"),
        ([], torch.zeros(0), (), ValueError, "has no axes; expected a tensor with rows"),
        ([0], torch.zeros(1, 3, device="meta"), (6, 3), ValueError, "indices on cpu, but values on meta"),
    ],
    ids=["float", "array", "sparse", "above", "width", "length", "two axes", "no axes", "devices"],
)
def test_inconsistent_row_sparse_parts_are_refused(
    ids: Any, values: Any, shape: tuple[int, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        RowSparse(ids, values, shape)
    assert type(caught.value) is error


# -- sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", ["rows only", "beside a dense value"])
def test_half_precision_rows_are_summed_in_float32(kv: KVStore, more: str) -> None:
    values = torch.tensor([[2048.0], [1.0], [1.0]], dtype=torch.float16)
    kv.init("w", torch.zeros(2, 1, dtype=torch.float16))
    kv.push("w", [RowSparse([1], value[None], (2, 1)) for value in values])
    assert pulled(kv, like=torch.zeros(2, 1).half()).tolist() == [[0.0], [2050.0]]
    beside = [torch.zeros(2, 1).half()] if more == "beside a dense value" else []
    kv.push("w", [RowSparse([1, 1, 1], values, (2, 1)), *beside])
    assert pulled(kv, like=torch.zeros(2, 1).half()).tolist() == [[0.0], [2050.0]]


def test_rows_are_added_in_the_order_of_the_devices(kv: KVStore) -> None:
    parts = [1e8, 1.0, -1e8, 1.0]
    for rows in (1, 3, 30, 300):
        kv.init(rows, torch.zeros(rows, 1))
        kv.push(rows, [RowSparse(range(rows), torch.full((rows, 1), part), (rows, 1)) for part in parts])
        assert pulled(kv, rows, torch.zeros(rows, 1)).unique().tolist() == [1.0], f"{rows} rows"


def test_a_push_neither_changes_nor_keeps_the_pushed_rows(kv: KVStore) -> None:
    part, coo = sparse([4, 1, 4]), sparse([0, 5]).to_coo()
    kv.init("w", table())
    kv.push("w", [part, coo])
    kv.set_updater(add_rows)
    kv.push("w", part)
    kv.push("w", coo)
    kv.set_updater(lambda key, summed, stored: stored.copy_(summed.to_dense()))
    assert part.indices.tolist() == [4, 1, 4]
    assert torch.equal(part.values, sparse([4, 1, 4]).values)
    assert torch.equal(coo.to_dense(), dense(sparse([0, 5])))
    kv.push("w", part)
    part.values.fill_(-5)
    part.indices.fill_(0)
    assert torch.equal(pulled(kv), dense(sparse([4, 1, 4])))


def test_init_and_broadcast_store_rows_dense(kv: KVStore) -> None:
    kv.init(["a", "b"], [sparse([1, 1]), sparse([2]).to_coo()])
    kv.broadcast("c", sparse([4]), torch.empty(ROWS, WIDTH))
    for key, part in (("a", sparse([1, 1])), ("b", sparse([2])), ("c", sparse([4]))):
        assert torch.equal(pulled(kv, key), dense(part))


# -- updaters ---------------------------------------------------------------------------------------------------------


def test_an_updater_gets_distinct_rising_rows(kv: KVStore) -> None:
    seen: list[Any] = []
    kv.init("w", table())
    kv.set_updater(lambda key, summed, stored: seen.append(summed))
    kv.push("w", [sparse([4, 1, 4]), sparse([0, 4], 7).to_coo()])
    kv.push("w", sparse([]))
    kv.push("w", [sparse([4, 1]), table()])
    rows, none, mixed = seen
    assert isinstance(rows, RowSparse)
    assert rows.indices.tolist() == [0, 1, 4]
    assert torch.equal(rows.to_dense(), dense(sparse([4, 1, 4])) + dense(sparse([0, 4], 7)))
    assert isinstance(none, RowSparse)
    assert (none.indices.tolist(), none.values.shape, none.shape) == ([], (0, WIDTH), (ROWS, WIDTH))
    assert isinstance(mixed, torch.Tensor)
    assert torch.equal(mixed, dense(sparse([4, 1])) + table())
    assert torch.equal(pulled(kv), table())


# -- optimizers -------------------------------------------------------------------------------------------------------


def dense_run(
    optimizer_class: type[torch.optim.Optimizer], arguments: dict[str, Any], gradients: Sequence[RowSparse]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Torch's dense optimizer over the whole table, where after each step the rows not named get back what they had.

    Returns:
        The table, and the state of its rows by name. A row's state begins as a step over zeros leaves it.
    """
    weight = table(torch.float64)
    idle = torch.zeros_like(weight)
    begin = optimizer_class([idle], **arguments)
    idle.grad = torch.zeros_like(idle)
    begin.step()
    optimizer = optimizer_class([weight], **arguments)
    for one in gradients:
        state = optimizer.state[weight] or begin.state[idle]
        before = {name: value.clone() for name, value in state.items() if by_row(value)}
        weight_before = weight.clone()
        weight.grad = dense(one)
        optimizer.step()
        others = torch.ones(ROWS, dtype=torch.bool)
        others[one.indices] = False
        weight[others] = weight_before[others]
        for name, value in before.items():
            optimizer.state[weight][name][others] = value[others]
    return weight, {name: value for name, value in optimizer.state[weight].items() if by_row(value)}


def by_row(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == (ROWS, WIDTH)


def start(kv: KVStore, spec: Any, dtype: torch.dtype = torch.float64, keys: Sequence[Any] = ("w",)) -> None:
    kv.init(list(keys), [table(dtype) for _ in keys])
    kv.set_optimizer(spec)


def of_rows(kv: KVStore, key: str = '"w"') -> dict[str, torch.Tensor]:
    """The optimizer's state of a table's rows, by name."""
    tensors = kv.optimizer_state().tensors
    return {place.rpartition("/")[2]: value for place, value in tensors.items() if place.startswith(f"{key}/")}


def double(kv: KVStore) -> torch.Tensor:
    return pulled(kv, like=table(torch.float64))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_rows_are_those_of_the_dense_optimizer_on_these_rows(kv: KVStore, name: str) -> None:
    optimizer_class, arguments = OPTIMIZERS[name]
    start(kv, (name, arguments))
    steps = [gradient(step) for step in range(2 * len(NAMED))]
    for step, part in enumerate(steps):
        kv.push("w", part.to_dense() if step == 3 else part)
        if step == 4:
            kv.load_optimizer_state(kv.optimizer_state())
    everything = RowSparse(range(ROWS), steps[3].to_dense(), (ROWS, WIDTH))
    weight, state = dense_run(optimizer_class, arguments, [*steps[:3], everything, *steps[4:]])
    torch.testing.assert_close(double(kv), weight, rtol=1e-12, atol=1e-13)
    found = {place: value for place, value in of_rows(kv).items() if by_row(value)}
    torch.testing.assert_close(found, state, rtol=1e-12, atol=1e-13)


def test_torchs_own_sparse_optimizer_agrees(kv: KVStore) -> None:
    weight = table(torch.float64)
    optimizer = torch.optim.SparseAdam([weight], **SPARSE_ADAM)
    start(kv, ("sparseadam", SPARSE_ADAM))
    for step in range(2 * len(NAMED)):
        parts = [gradient(step, device) for device in range(3)]
        kv.push("w", [parts[0], parts[1].to_coo(), parts[2]])
        weight.grad = sum((part.to_coo() for part in parts[1:]), start=parts[0].to_coo()).coalesce()
        optimizer.step()
    torch.testing.assert_close(double(kv), weight, rtol=1e-12, atol=1e-12)
    for place, value in of_rows(kv).items():
        expected = optimizer.state[weight][place]
        torch.testing.assert_close(value, torch.as_tensor(expected).to(value.dtype), rtol=1e-12, atol=1e-12)


def test_a_late_row_starts_from_the_initial_step_size_of_its_key(kv: KVStore) -> None:
    start(kv, ("rprop", {"lr": 0.1}), keys=["a", "b"])
    kv.push("a", RowSparse([0], torch.ones(1, WIDTH).double(), (ROWS, WIDTH)))
    kv.set_learning_rate(0.5)
    kv.push("b", RowSparse([0], torch.ones(1, WIDTH).double(), (ROWS, WIDTH)))
    assert of_rows(kv, '"a"')["step_size"].unique().tolist() == [0.1]
    assert of_rows(kv, '"b"')["step_size"].unique().tolist() == [0.5]


WHOLE_TENSORS = {"adafactor": "adafactor", "muon": "muon", "Careless": Careless}
WHOLE = "works on whole tensors, but the gradient of key 'b' is row-sparse; .*"
WHOLE += re.escape("expected an elementwise optimizer (sgd, adam, adagrad), or a dense")


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    ("spec", "words", "good", "bad"),
    [
        *((spec, f"'{name}' {WHOLE}", table(), sparse([1])) for name, spec in WHOLE_TENSORS.items()),
        ("sparseadam", "'sparseadam' takes row-sparse gradients only, but that of key 'b'", sparse([1]), table()),
    ],
    ids=[*WHOLE_TENSORS, "sparseadam"],
)
def test_optimizers_refuse_gradients_of_the_other_kind_by_name(
    kv: KVStore, spec: Any, words: str, good: Any, bad: Any, async_op: bool
) -> None:
    start(kv, spec, torch.float32, ["a", "b"])
    kv.push("a", good)
    before, state = pulled(kv, "a"), of_rows(kv, '"a"')
    with pytest.raises(ValueError, match=words):
        kv.push(["a", "b"], [good, bad], async_op=async_op).wait(LIMIT)
    assert torch.equal(pulled(kv, "a"), before)
    assert torch.equal(pulled(kv, "b"), table())
    assert all(torch.equal(value, state[place]) for place, value in of_rows(kv, '"a"').items())
    if spec != "sparseadam":
        kv.push("b", [table(), sparse([1])])  # their sum is dense
        assert not torch.equal(pulled(kv, "b"), table())


# -- row_sparse_pull --------------------------------------------------------------------------------------------------

ROW_IDS: dict[str, tuple[Any, list[int]]] = {
    "repeated": ([4, 1, 4, 4], [1, 4]),
    "empty list": ([], []),
    "empty tensor": (torch.tensor([]), []),
    "two axes": (torch.tensor([[5, 1], [1, 0]]), [0, 1, 5]),
    "no axes": (torch.tensor(3), [3]),
    "a number": (3, [3]),
    "uint8": (torch.tensor([5, 2], dtype=torch.uint8), [2, 5]),
    "numpy uint32": (np.array([5, 2], np.uint32), [2, 5]),
    "numpy numbers": ([np.int64(5), 2], [2, 5]),
    "numpy, backwards": (np.array([5, 2, 0])[::-1], [0, 2, 5]),
    "numpy, read-only": (np.frombuffer(np.array([5, 2]).tobytes(), np.int64), [2, 5]),
    "strided": (torch.arange(6)[::2], [0, 2, 4]),
    "whole numbers as floats": (torch.tensor([1.0, 3.0]), [1, 3]),
}


def empty_rows(rows: int = ROWS) -> RowSparse:
    return RowSparse([0, 0], torch.full((2, WIDTH), 99.0), (rows, WIDTH))


@pytest.mark.parametrize("ids", ROW_IDS.values(), ids=ROW_IDS)
def test_the_rows_named_are_pulled(kv: KVStore, ids: tuple[Any, list[int]]) -> None:
    row_ids, named = ids
    kv.init("w", [table()])
    out, whole = empty_rows(), torch.full((ROWS, WIDTH), 99.0)
    kv.row_sparse_pull("w", out, row_ids=row_ids)
    kv.row_sparse_pull("w", whole, row_ids=row_ids)
    assert out.indices.tolist() == named
    assert torch.equal(out.values, table()[named])
    expected = torch.full((ROWS, WIDTH), 99.0)
    expected[named] = table()[named]
    assert torch.equal(whole, expected)
    out.values.fill_(-1)  # a copy
    assert torch.equal(pulled(kv), table())


def test_lists_of_keys_outs_and_row_ids(kv: KVStore) -> None:
    keys = ["a", 3]
    kv.init(keys, [table(), table() * 2])
    outs, whole = [empty_rows() for _ in range(3)], torch.zeros(ROWS, WIDTH)
    kv.row_sparse_pull("a", [outs[0], whole, outs[1]], row_ids=torch.tensor([5, 1]))  # for all outs
    for out in (outs[0].to_dense(), whole, outs[1].to_dense()):
        assert torch.equal(out[[1, 5]], table()[[1, 5]])
        assert not out[[0, 2, 3, 4]].any()
    for call_keys, call_outs, row_ids, named, factors in (
        ("a", outs, [torch.tensor([5, 1]), [2], np.array([], np.int64)], [[1, 5], [2], []], (1, 1, 1)),
        (keys, [outs[0], outs[1:]], [[4, 4], [torch.tensor([0]), torch.tensor([5, 1])]], [[4], [0], [1, 5]], (1, 2, 2)),
        (["a", "a"], outs[:2], [[1], [2]], [[1], [2], [1, 5]], (1, 1, 2)),
        ([], [], [], [[1], [2], [1, 5]], (1, 1, 2)),
    ):
        kv.row_sparse_pull(call_keys, call_outs, row_ids=row_ids)
        assert [out.indices.tolist() for out in outs] == named
        for out, factor in zip(outs, factors, strict=True):
            assert torch.equal(out.values, table()[out.indices] * factor)


def test_numpy_outs_and_strided_ones_are_written_in_place(kv: KVStore) -> None:
    kv.init("w", table())
    array, wide = np.zeros((ROWS, WIDTH), np.float32), torch.full((ROWS, 2 * WIDTH), 99.0)
    kv.row_sparse_pull("w", [array, wide[:, ::2]], row_ids=[3, 1])
    assert np.array_equal(array[[1, 3]], table()[[1, 3]].numpy())
    assert not array[[0, 2, 4, 5]].any()
    assert torch.equal(wide[[1, 3], ::2], table()[[1, 3]])
    assert (wide[:, 1::2] == 99).all()
    assert (wide[[0, 2, 4, 5]] == 99).all()


G = torch.full((ROWS, WIDTH), 7.0)
"""An output that no refused call may write to."""

# The key, the outs, the row_ids, the class of the error, what its message says.
PULLS: dict[str, tuple[Any, Any, Any, type[Exception], str]] = {
    "above": ("w", G, [1, 6], ValueError, r"'w' names row 6; expected 0 to 5, as its shape is \(6, 3\)"),
    "float ids": ("w", G, torch.tensor([1.5]), TypeError, r"'w' has row numbers of .*float32; expected integers"),
    "bool ids": ("w", G, [True], TypeError, r"'w' has row numbers of .*bool"),
    "no ids": ("w", G, None, TypeError, r"no row_ids; expected the rows' numbers \(pull\(\) gives all rows\)"),
    "shape of rows": ("w", empty_rows(7), [1], ValueError, r"'w' has shape \(6, 3\).*\(7, 3\)"),
    "one out": ("w", [G, G[:5]], [1], ValueError, r"'w'.*\(5, 3\)"),
    "sparse out": ("w", G.to_sparse(1), [1], ValueError, "'w'.*sparse_coo"),
    "no outs": ("w", [], [1], ValueError, "'w' has an empty list"),
    "too few ids": ("w", [G] * 3, [G[:1].long()] * 2, ValueError, "'w' has 3 tensors to pull into, but 2 row_ids"),
    "ids for one key": (["w", "v"], [G, G], [[1]], ValueError, "2 keys got 1 values"),
    "one for all keys": (["w", "v"], [G, G], torch.tensor([1]), TypeError, "2 keys got a Tensor"),
    "last out": ("w", [G, G], [torch.tensor([1]), torch.tensor([6])], ValueError, "'w' names row 6"),
    "no rows": ("s", torch.zeros(()), [], ValueError, "'s' has no axes"),
}


@pytest.mark.parametrize("case", PULLS)
def test_a_wrong_row_pull_is_named_at_once_and_writes_nothing(kv: KVStore, case: str) -> None:
    key, outs, row_ids, error, words = PULLS[case]
    kv.init(["w", "v", "s"], [table(), table() * 2, torch.zeros(())])
    for async_op in (False, True):
        with pytest.raises(error, match=words) as caught:
            kv.row_sparse_pull(key, outs, row_ids=row_ids, async_op=async_op)
        assert type(caught.value) is error
    assert (G == 7).all()
    assert torch.equal(pulled(kv), table())
    out = empty_rows()
    kv.row_sparse_pull("v", out, row_ids=[4])
    assert torch.equal(out.values, table()[[4]] * 2)


def add_rows(key: Any, summed: RowSparse | torch.Tensor, stored: torch.Tensor) -> None:
    """Add, and change the sum, which an updater may."""
    if isinstance(summed, RowSparse):
        stored.index_add_(0, summed.indices, summed.values)
        summed.values.fill_(1e6)
        summed.indices.zero_()
    else:
        stored.add_(summed)


# -- what a push costs ------------------------------------------------------------------------------------------------


class Elements(TorchDispatchMode):
    """The most elements that any operation of torch has made or written.

    A view makes none; writing rows into a table (`index_copy_`, or adding a sparse tensor to it) writes the rows only.
    """

    ROW_WRITES = ("index_copy_", "index_add_", "index_fill_")

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in self.ROW_WRITES:
            added = args[1:] if name.endswith("_") else ()
            smallest = min((elements(one) for one in added if self._is_sparse(one)), default=None)
            for one in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(one, torch.Tensor):
                    self.most = max(self.most, elements(one) if smallest is None else smallest)
        return out

    @staticmethod
    def _is_sparse(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo


def elements(tensor: torch.Tensor) -> int:
    return tensor._values().numel() if tensor.layout == torch.sparse_coo else tensor.numel()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "sparseadam", "updater"])
def test_a_push_works_on_its_rows_only(kv: KVStore, name: str, devices: int) -> None:
    shape = (5000, WIDTH)
    parts = [RowSparse([9, 4000, 9, 17 + device], torch.ones(4, WIDTH), shape) for device in range(devices)]
    kv.init("w", torch.ones(shape))
    if name == "updater":
        kv.set_updater(add_rows)
    else:
        kv.set_optimizer((name, SPARSE_ADAM if name == "sparseadam" else OPTIMIZERS[name][1]))
    kv.push("w", parts)
    with Elements() as counted:
        kv.push("w", parts)
    assert 0 < counted.most <= 4 * WIDTH * devices


@pytest.mark.parametrize("out", ["rows", "dense"])
def test_a_row_pull_works_on_its_rows_only(kv: KVStore, out: str) -> None:
    shape = (5000, WIDTH)
    kv.init("w", torch.ones(shape))
    target: Any = torch.zeros(shape) if out == "dense" else RowSparse([], torch.zeros(0, WIDTH), shape)
    with Elements() as counted:
        kv.row_sparse_pull("w", [target, target], row_ids=[7, 4999, 7])
    assert 0 < counted.most <= 3 * WIDTH


@pytest.mark.usefixtures("stream_order")
def test_the_host_waits_once_for_rows_of_a_gpu_and_never_for_rows_that_go_there() -> None:
    rows = sparse([1, 4])
    with simulated_gpus():
        with counted() as counts:
            there = rows.to(torch.device("cuda", 0))
        assert (counts.waits, counts.to_gpu) == ([], [2, 2 * WIDTH])
        with counted() as counts:
            back = there.to(torch.device("cpu"))
        assert (len(counts.waits), counts.to_host) == (1, [2, 2 * WIDTH])
        assert torch.equal(back.indices, rows.indices)
        assert torch.equal(back.values, rows.values)
