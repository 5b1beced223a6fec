"""Compression: codecs, error feedback, and the user's options."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from gangline.kvstore.compression import (
    BFloat16,
    Codec,
    Float16,
    TopK,
    TwoBit,
    compress,
    parse,
    register,
    registry,
    spans,
)
from tests.kvstore.keyed import bits

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CODECS: list[Codec] = [TwoBit(0.5), Float16(), BFloat16(), TopK(0.1)]
SIZES = [0, 1, 3, 4, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 200, 1000]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use pieces of 32 values and a thread per 96, so that small tensors reach every boundary."""
    monkeypatch.setattr(spans, "_PIECE", 32)
    monkeypatch.setattr(spans, "_SMALLEST_SPAN", 96)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 0.3) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def decoded(codec: Codec, payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, 7.0)
    codec.decode(payload, out)
    return out


# -- 2bit: the scalar rule --------------------------------------------------------------------------------------------


def rounded(value: float, dtype: torch.dtype) -> float:
    """Round float64 to the dtype; the sum of two numbers of the dtype is then rounded once."""
    if dtype == torch.bfloat16:
        return float(torch.tensor(value, dtype=torch.float64).to(torch.float32).to(torch.bfloat16))
    kind = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}[dtype]
    return float(kind(value))


def scalar_rule(residual: list[float], gradient: list[float], threshold: float, dtype: torch.dtype) -> list[int]:
    """Encode value by value; change ``residual`` and return the codes."""
    codes = []
    for i, value in enumerate(gradient):
        total = rounded(residual[i] + value, dtype)
        code = 0
        if total >= threshold:
            code, total = 1, rounded(total - threshold, dtype)
        elif total <= -threshold:
            code, total = 3, rounded(total + threshold, dtype)
        residual[i] = total
        codes.append(code)
    return codes


def packed(codes: list[int]) -> bytes:
    padded = codes + [0] * (-len(codes) % 16)
    return bytes(sum(padded[i + j] << 2 * j for j in range(4)) for i in range(0, len(padded), 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "threshold"), [pytest.param(97, 0.5, marks=pytest.mark.slow), (131, 0.03)])
@pytest.mark.usefixtures("small_pieces")
def test_two_bit_is_the_scalar_rule_bit_for_bit_over_200_steps(
    dtype: torch.dtype, numel: int, threshold: float
) -> None:
    codec, residual = TwoBit(threshold), torch.zeros(numel, dtype=dtype)
    in_dtype = rounded(threshold, dtype)
    expected = [0.0] * numel
    for step in range(200):
        gradient = normal(numel, dtype=dtype, seed=step, scale=threshold)
        gradient[step % numel] = threshold  # at the threshold
        gradient[(step + 1) % numel] = -threshold
        codes = scalar_rule(expected, gradient.tolist(), in_dtype, dtype)
        payload = compress(codec, gradient, residual, "a key")
        assert payload.numpy().tobytes() == packed(codes)
        assert bits(residual) == bits(torch.tensor(expected, dtype=dtype))
        sent = [{0: 0.0, 1: in_dtype, 3: -in_dtype}[code] for code in codes]
        assert bits(decoded(codec, payload, gradient)) == bits(torch.tensor(sent, dtype=dtype))


def test_a_threshold_that_the_dtype_cannot_hold() -> None:
    for threshold in (1e-9, 1e6):
        residual = torch.zeros(4, dtype=torch.float16)
        with pytest.raises(ValueError, match=r"threshold .* in torch\.float16; expected one that stays finite"):
            compress(TwoBit(threshold), torch.ones(4, dtype=torch.float16), residual, "a key")
        assert not residual.any()


# -- half precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "values"),
    [
        *((Float16(), torch.tensor([1e5, 65536.0, 3e38, 1.0], dtype=dtype)) for dtype in DTYPES[1:]),
        (BFloat16(), torch.tensor([3.4e38, 1.0])),
        (BFloat16(), torch.tensor([1e300, 1.0], dtype=torch.float64)),
    ],
)
def test_half_saturates(codec: Float16 | BFloat16, values: torch.Tensor) -> None:
    for sign in (1, -1):
        *large, one = codec.encode(sign * values).view(codec.dtype).tolist()
        assert [*large, one] == [sign * torch.finfo(codec.dtype).max] * len(large) + [sign]


# -- top-k ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.01, 0.001, 0.9])
def test_top_k_finds_the_same_from_a_sample(ratio: float) -> None:
    numel = 2**17 + 3  # every second value is sampled
    tied = torch.arange(numel) % 2 * 1.0
    for values in (normal(numel), normal(numel, dtype=torch.bfloat16), tied, torch.zeros(numel)):
        count = math.ceil(ratio * numel)
        best = values.abs().sort(descending=True, stable=True).indices[:count].sort().values
        indices = TopK(ratio).encode(values)[: 4 * count].view(torch.int32)
        assert torch.equal(indices.long(), best)


def test_an_unrepresentative_sample_changes_nothing() -> None:
    values = torch.zeros(2**17)
    values[::2] = 5.0  # all that the sample sees
    values[1] = 9.0
    indices = TopK(0.001).encode(values)[: 4 * 132].view(torch.int32)
    assert indices.tolist() == [0, 1, *range(2, 2 * 131, 2)]


def test_the_ratio_is_the_decimal_number_as_written() -> None:
    assert 0.07 * 100 > 7
    assert TopK(0.07).payload_bytes(100, torch.float32) == 7 * 8


def test_top_k_refuses_what_int32_cannot_index() -> None:
    with pytest.raises(ValueError, match="TopK cannot encode a tensor of 2147483648 values; expected fewer"):
        TopK().payload_bytes(2**31, torch.float32)


def test_top_k_refuses_an_index_out_of_range() -> None:
    for index in (-1, 10):
        payload = torch.cat((torch.tensor([index], dtype=torch.int32), torch.ones(1).view(torch.int32)))
        with pytest.raises(ValueError, match=f"indices from {index} to {index}; expected 0 to 9"):
            TopK(0.1).decode(payload.view(torch.uint8), torch.zeros(10))


# -- every codec ------------------------------------------------------------------------------------------------------


def by_rule(codec: Codec, values: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    """Return payload and decoded values, value by value."""
    plain = values.tolist()
    if isinstance(codec, TwoBit):
        codes = [1 if value >= 0.5 else 3 if value <= -0.5 else 0 for value in plain]
        return packed(codes), torch.tensor([(0.0, 0.5, 0.0, -0.5)[code] for code in codes], dtype=values.dtype)
    if isinstance(codec, TopK):
        count = math.ceil(codec.ratio * len(plain))
        best = torch.tensor(
            sorted(sorted(range(len(plain)), key=lambda i: (-abs(plain[i]), i))[:count]), dtype=torch.int32
        )
        sent = torch.zeros_like(values)
        sent[best] = values[best]
        return bits(best) + bits(values[best]), sent
    assert isinstance(codec, Float16 | BFloat16)
    return bits(values.to(codec.dtype)), values.to(codec.dtype).to(values.dtype)


@pytest.mark.parametrize("codec", [TwoBit(0.5), Float16(), BFloat16(), *map(TopK, (0.001, 0.01, 0.25, 1.0))])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("small_pieces")
def test_a_codec_is_its_rule_for_any_size_layout_and_place_of_the_payload(codec: Codec, dtype: torch.dtype) -> None:
    for numel in SIZES:
        values = normal(numel, dtype=dtype)  # float16 and bfloat16 have ties
        expected, sent = by_rule(codec, values)
        wide = torch.full((numel, 3), 7.0, dtype=dtype)
        wide[:, 1] = values
        with torch.inference_mode(numel % 2 == 0):
            payload = codec.encode(wide[:, 1])
        assert payload.numpy().tobytes() == expected
        assert payload.shape == (codec.payload_bytes(numel, dtype),)
        assert torch.equal(wide[:, 1], values)
        message = torch.zeros(len(expected) + 1, dtype=torch.uint8)
        message[1:] = payload
        codec.decode(message[1:], wide[:, 1])
        assert torch.equal(wide[:, 1], sent)
        assert bool((wide[:, ::2] == 7).all())


@pytest.mark.parametrize("codec", CODECS)
def test_gradients_of_any_strides_and_scalars_have_residuals(codec: Codec) -> None:
    plain = normal(2, 5, 7, 3).requires_grad_()
    expected, residual = torch.zeros(2, 5, 7, 3), torch.zeros(2, 3, 5, 7).permute(0, 2, 3, 1)
    payload = compress(codec, plain, expected, "a key")
    assert torch.equal(compress(codec, plain.to(memory_format=torch.channels_last), residual, "a key"), payload)
    assert torch.equal(residual, expected)
    assert not payload.requires_grad
    scalar = compress(codec, torch.tensor(100000.0), kept := torch.zeros(()), "a key")
    assert decoded(codec, scalar, kept) + kept == 100000.0  # the residual keeps what saturation cuts off


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_refused_before_anything_changes(codec: Codec, bad: float, dtype: torch.dtype) -> None:
    gradient = normal(100, dtype=dtype)
    gradient[63] = bad
    residual = normal(100, dtype=dtype, seed=1)
    before = residual.clone()
    for kept in (residual, None):
        with pytest.raises(ValueError, match=r"the gradient of key 'fc\.weight' holds NaN or infinity"):
            compress(codec, gradient, kept, "key 'fc.weight'")
    assert torch.equal(residual, before)


@pytest.mark.parametrize("codec", CODECS)
def test_a_sum_that_overflows_is_refused(codec: Codec) -> None:
    largest = torch.finfo(torch.float16).max
    gradient, residual = (torch.tensor([largest, 0.0], dtype=torch.float16) for _ in range(2))
    with pytest.raises(
        ValueError, match=r"the gradient of key 3 and its residual add up to infinity in torch\.float16"
    ):
        compress(codec, gradient, residual, "key 3")
    assert residual.tolist() == [largest, 0.0]
    compress(codec, gradient.flip(0), residual, "key 3")  # another key has a residual of its own


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (torch.tensor([0.0, math.nan]), "residual of key 3 holds NaN"),
        (torch.zeros(3), r"residual of key 3 has shape torch.Size\(\[3\]\)"),
        (torch.zeros(2, dtype=torch.float64), "residual of key 3 has dtype torch.float64"),
        (torch.zeros(2, device="meta"), "residual of key 3 has device meta"),
    ],
)
def test_a_residual_that_does_not_fit(residual: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compress(TwoBit(), torch.zeros(2), residual, "key 3")


@pytest.mark.parametrize("codec", CODECS)
def test_integers_are_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match=r"cannot compress a tensor of torch\.int64"):
        compress(codec, torch.ones(3, dtype=torch.int64), None, "a key")
    with pytest.raises(ValueError, match=r"cannot compress a tensor of torch\.int64"):
        codec.encode(torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_that_does_not_fit(codec: Codec) -> None:
    payload = codec.encode(normal(100))
    out = torch.zeros(100)
    for wrong in (payload[:-1], torch.cat((payload, payload[:1])), payload.view(1, -1), payload.view(torch.int8)):
        with pytest.raises(ValueError, match=r"payload has shape .* expected"):
            codec.decode(wrong, out)
    assert not out.any()


# -- the registry -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "added"),
    [
        ({"type": "2bit"}, {"threshold": 0.5, "error_feedback": True, "pull_type": None}),
        ({"type": "2bit", "threshold": 1}, {"threshold": 1.0, "error_feedback": True, "pull_type": None}),
        ({"type": "fp16"}, {"error_feedback": False, "pull_type": None}),
        ({"type": "bf16", "error_feedback": True, "pull_type": "fp16"}, {}),
        ({"type": "topk"}, {"ratio": 0.01, "error_feedback": True, "pull_type": None}),
    ],
)
def test_params_are_completed(params: dict[str, Any], added: dict[str, Any]) -> None:
    made, expected = parse(params), params | added
    assert made.params == expected
    assert made.error_feedback is expected["error_feedback"]
    assert (made.pull_codec is None) == (expected["pull_type"] is None)
    assert parse(msgpack.unpackb(msgpack.packb(made.params))) == made
    assert hash(parse(made.params)) == hash(made)


TYPES = r"\['2bit', 'bf16', 'fp16', 'topk'\]"
OPTIONS = r"\['threshold', 'error_feedback', 'pull_type'\]"


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ("2bit", TypeError, "compression is '2bit', a str; expected a dict"),
        (None, TypeError, "expected a dict"),
        ({}, ValueError, f"names no type; expected 'type' to be one of {TYPES}"),
        ({"type": "1bit"}, ValueError, f"no compression type '1bit'; expected one of {TYPES}"),
        ({"type": 2}, TypeError, "type is 2, a int; expected a str"),
        ({3: 4, "type": "2bit"}, TypeError, "an option 3, a int; expected a str"),
        ({"type": "2bit", "ratio": 0.5}, ValueError, f"'2bit' has no option 'ratio'; expected {OPTIONS}"),
        ({"type": "2bit", "threshold": 0}, ValueError, "threshold is 0; expected a finite number > 0"),
        ({"type": "2bit", "threshold": math.inf}, ValueError, "threshold is inf"),
        ({"type": "2bit", "threshold": True}, TypeError, "threshold is True, a bool; expected a number"),
        ({"type": "topk", "ratio": 0}, ValueError, "ratio is 0; expected 0 < ratio <= 1"),
        ({"type": "fp16", "error_feedback": 1}, TypeError, "error_feedback is 1, a int; expected a bool"),
        ({"type": "fp16", "pull_type": "2bit"}, ValueError, r"is '2bit'; expected one of \['fp16', 'bf16', None"),
    ],
)
def test_params_that_do_not_fit(params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse(params)


class Signs(Codec):
    """Third-party codec: one byte per value, its sign times ``scale``."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1).sign().to(torch.int8).view(torch.uint8)

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(payload.view(torch.int8).view(out.shape)).mul_(self.scale)


def test_a_custom_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    assert register("signs")(Signs) is Signs
    made = parse({"type": "signs", "scale": 0.25})
    assert made.params == {"type": "signs", "scale": 0.25, "error_feedback": True, "pull_type": None}
    residual = torch.zeros(3)
    payload = compress(made.codec, torch.tensor([1.0, -0.5, 0.0]), residual, "a key")
    assert decoded(made.codec, payload, residual).tolist() == [0.25, -0.25, 0.0]
    assert residual.tolist() == [0.75, -0.25, 0.0]
    with pytest.raises(ValueError, match="'signs' needs the option 'scale'"):
        parse({"type": "signs"})
    with pytest.raises(ValueError, match="named 'signs' is registered already: Signs"):
        register("signs")


def test_invalid_registrations_are_refused() -> None:
    with pytest.raises(ValueError, match="named '2bit' is registered already: TwoBit"):
        register("2bit")
    with pytest.raises(TypeError, match="name is 3, a int; expected a str"):
        register(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'no class' is not a subclass of Codec"):
        register("new")("no class")  # type: ignore[type-var]
