"""Arguments of `balance`: their checks on this rank, and those that must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn
from torch.utils.data import IterableDataset

from gangline.kvstore.group.worker_group import check_same
from gangline.kvstore.replica_check import check_interval
from gangline.kvstore.workload import check_work_load_list
from gangline.models.balance.gradient_weights import check_not_balanced
from gangline.models.balance.iterable_batches import check_stream
from gangline.models.balance.lockstep import LossReduction
from gangline.models.balance.rank_balance import checked_caps
from gangline.models.balance.rank_exchange import RankExchange
from gangline.models.batchnorm.distributed_batchnorm import smallest_share
from gangline.models.data.accelerate_loaders import accumulated_steps, unprepared
from gangline.models.data.lengths import Arrangement, arrangement_of
from gangline.models.data.loaders import own_iteration, settings_of
from gangline.models.data.order import Order
from gangline.models.data.same_data import check_same_data, describe_data


@dataclass(kw_only=True)
class LoaderArguments:
    """The arguments of a balanced loader after their checks."""

    loader: Any
    """That of the program, without accelerate's loader around it."""
    prepared: Any
    """accelerate's loader, if there is one."""
    order: Order | None
    """Of a map-style data set."""
    arrangement: Arrangement | None
    """None without ``lengths``."""
    caps: list[int | None] | None
    """Those that the user gave."""
    loads: list[float]
    global_batch: int
    accumulate: int
    minimum: int
    """The smallest share that is not empty."""
    drawn_ahead: int
    """Batches that processes of the loader read ahead; once agreed, the most of all ranks."""


def agreed_arguments(
    exchange: RankExchange, networks: Sequence[nn.Module], loader: Any, **options: Any
) -> LoaderArguments:
    """Check the arguments of `balance` on all ranks, see `_checked`. Collective; MismatchError if they differ."""
    checked: list[LoaderArguments] = []

    def check() -> tuple[dict[str, Any], int, int | None, dict[str, Any]]:
        arguments, settings = _checked(exchange, networks, loader, **options)
        checked.append(arguments)
        order = arguments.order
        data = {} if order is None else describe_data(arguments.loader)
        return settings, arguments.drawn_ahead, getattr(order, "length", None), data

    settings, aheads, lengths, data = zip(*exchange.all_gather_results(check, "balance()"), strict=True)
    check_same(settings, "balance")
    check_same_data(data)
    (arguments,) = checked
    arguments.drawn_ahead = max(aheads)
    if arguments.order is not None and arguments.order.of_all_ranks:
        arguments.order.rank_lengths = lengths
    return arguments


def _checked(
    exchange: RankExchange,
    networks: Sequence[nn.Module],
    loader: Any,
    *,
    loads: Any,
    global_batch: int | None,
    count: Any,
    loss_reduction: LossReduction,
    max_share: Any,
    stream: Any,
    lengths: Any,
    padding: bool,
    accumulate: int | None,
    pool: int,
    budget: float | None,
) -> tuple[LoaderArguments, dict[str, Any]]:
    """Return checked arguments, and settings that must be equal on all ranks."""
    if loss_reduction not in get_args(LossReduction):
        raise ValueError(f"loss_reduction is {loss_reduction!r}; expected 'mean', 'sum' or 'normalized'")
    size, given, is_weighted = exchange.size, checked_loads(loads, exchange.size), loss_reduction != "normalized"
    if is_weighted:
        check_not_balanced(networks)
    plain, prepared, samples = loader, None, global_batch
    if (inner := unprepared(loader)) is not None:
        plain, prepared, samples = inner.loader, loader, global_batch or inner.global_batch
    order = None
    if stream is None and own_iteration(plain) is None and not isinstance(plain.dataset, IterableDataset):
        order = Order(plain, exchange, samples)
        total = order.size
    else:
        total = check_stream(plain, stream, samples, size)
    caps = None
    if max_share is not None and max_share != "auto":
        caps = checked_caps(max_share, size, total if lengths is None else 0)
    has_means = count is not None and loss_reduction == "mean"
    together = accumulate
    if together is None:
        is_kept = prepared is None or lengths is None or stream == "sharded" or has_means
        together = 1 if is_kept else accumulated_steps()
    elif together != 1 and lengths is None and is_weighted and not has_means:
        raise ValueError(
            f"accumulate is {accumulate}; expected lengths, by which the samples of an update are sorted, or count of "
            "a mean, which is then over all batches of an update; else accumulate=1"
        )
    arrangement = arrangement_of(lengths, plain, stream, padding, together, pool, budget, by_parts=not is_weighted)
    minimum = smallest_share(*networks)
    settings = {
        **settings_of(plain),
        "the global batch": total,
        "stream": stream,
        "loads": given if loads != "auto" else "auto",
        "loss_reduction": loss_reduction,
        "max_share": caps or max_share,
        "count": "given" if count is not None else "samples",
        "the smallest share": minimum,
        "lengths": None if arrangement is None else arrangement.lengths.checksum,
        "padding": padding,
        "accumulate": together,
        "pool": pool,
        "budget": budget,
        "GANGLINE_REPLICA_CHECK": check_interval(),
        **(order.settings if order is not None else {}),
    }
    drawn_ahead = getattr(plain, "num_workers", 0) * (getattr(plain, "prefetch_factor", None) or 0)
    checked = LoaderArguments(
        loader=plain,
        prepared=prepared,
        order=order,
        arrangement=arrangement,
        caps=caps,
        loads=given,
        global_batch=total,
        accumulate=together,
        minimum=minimum,
        drawn_ahead=drawn_ahead,
    )
    return checked, settings


def checked_networks(model: Any, loader: Any) -> list[nn.Module]:
    """Return the networks that the loop trains; the last one holds parameters of no network."""
    networks: list[nn.Module] = []
    parameters, left = nn.ParameterList(), [model]
    while left:
        given = left.pop(0)
        if isinstance(given, nn.Module):
            networks.append(given)
        elif isinstance(given, nn.Parameter):
            parameters.append(given)
        elif (given is model and isinstance(model, Iterable)) or isinstance(given, list | tuple | Iterator):
            left[:0] = given
        else:
            swapped = ": write balance(model, loader)" if isinstance(loader, nn.Module) else ""
            raise TypeError(
                f"the first argument of balance() is a {type(model).__name__}; expected the network that the loop "
                f"trains, or a list of its networks and of parameters of no network{swapped}"
            )
    return [*networks, parameters] if len(parameters) else networks


def checked_loads(loads: Sequence[float] | Literal["auto"], size: int) -> list[float]:
    """Return the loads of all ranks; ValueError if one is no number above 0."""
    if isinstance(loads, str) and loads == "auto":
        return [1.0] * size
    with suppress(TypeError, ValueError):
        if all(checked := check_work_load_list(loads, size)):
            return checked
    raise ValueError(
        f"loads is {loads!r}; expected a number above 0 for each of {size} ranks, such as [3, 1], or 'auto'"
    )
