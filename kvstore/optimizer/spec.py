"""Optimizer specifications: classes of torch.optim and their arguments as plain data, checked when they are given."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from gangline.kvstore.errors import did_you_mean
from gangline.kvstore.optimizer.clipping import THRESHOLDS, check_thresholds

Key = str | int
Pattern = str | tuple[Key, ...]
"""Keys of an optimizer: a pattern as of fnmatch, or the keys themselves."""

# gangline's and MXNet's names -> torch's classes
_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "muon": torch.optim.Muon,
    "nadam": torch.optim.NAdam,
    "nag": torch.optim.SGD,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
    "sparseadam": torch.optim.SparseAdam,
}
_REFUSED = {"lbfgs": "it evaluates the loss several times per step, which push and pull do not allow"}
_WHOLE_TENSOR = (torch.optim.Adafactor, torch.optim.Muon)
_ALIASES = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
_RMSPROP_ALIASES = {"gamma1": "alpha", "gamma2": "momentum"}
_BETAS = ("beta1", "beta2")
_OURS = (*THRESHOLDS, "lr_mult", "rescale_grad", "wd_mult")
_NOT_DATA = ("closure", "params")


@dataclass(frozen=True)
class OptimizerSpec:
    """Optimizer as plain data: a class of torch.optim, its arguments, and gangline's own.

    Make one with `parse`.
    """

    name: str
    optimizer_class: type[torch.optim.Optimizer]
    arguments: dict[str, Any]
    """Arguments of the class by torch's names; always with ``lr``."""
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    clip_norm: float | None = None
    clip_global_norm: float | None = None
    lr_mult: dict[Key, float] = field(default_factory=dict)
    wd_mult: dict[Key, float] | str = field(default_factory=dict)
    pattern: Pattern = "*"
    parts: tuple[OptimizerSpec, ...] = ()
    """Optimizers by pattern: the first that matches a key updates it; empty: this one updates all keys."""

    @classmethod
    def parse(cls, spec: Any, parameters: Mapping[Any, torch.Tensor] | None = None) -> OptimizerSpec:
        """Check and normalise an optimizer.

        Arguments have torch's names or MXNet's (learning_rate, wd, epsilon, beta1, beta2, gamma1, gamma2). Every
        optimizer also takes:

        - ``rescale_grad``: factor of the summed gradient, 1 by default.
        - ``lr_mult``, ``wd_mult``: dicts of factors by key, 0 or more, of learning rate and weight decay.
          ``wd_mult="mxnet"`` disables decay for keys that end in neither "weight" nor "gamma".
        - at most one of ``clip_gradient`` (clips each element to +-c), ``clip_norm`` (scales each key's gradient down
          to norm c) and ``clip_global_norm`` (scales all gradients down to common norm c, see `KVStore.update`); they
          apply after ``rescale_grad``.

        A dict of patterns gives keys different optimizers. The first pattern that matches a key counts: a pattern as of
        fnmatch, a tuple of keys, or a function of (name, parameter), which `Trainer` and `Module` call. The arguments
        in the list above then stand beside the dict. The learning rate is that of the first pattern, and setting it
        multiplies all by the same factor, as torch's schedulers do.

        Args:
            spec: name, class of torch.optim, ``(name or class, dict of arguments)``, OptimizerSpec, or dict by pattern.
            parameters: parameters by key, for functions.

        Raises:
            TypeError: if ``spec`` has another form, or an argument is not plain data.
            ValueError: if the optimizer or an argument is unknown, or torch refuses a value.

        For example:

            OptimizerSpec.parse(("adam", {"learning_rate": 1e-3, "beta1": 0.8, "lr_mult": {"bias": 2.0}}))
            OptimizerSpec.parse({"hidden.*.weight": ("muon", {"lr": 0.02}), "*": ("adamw", {"lr": 1e-3})})
            OptimizerSpec.parse(({"head.*": ("sgd", {"lr": 1.0}), "*": "sgd"}, {"clip_global_norm": 1.0}))
        """
        kind, given = spec if isinstance(spec, (tuple, list)) and len(spec) == 2 else (spec, {})
        if isinstance(kind, OptimizerSpec) and not given:
            return kind
        if isinstance(kind, Mapping):
            return cls._by_pattern(kind, dict(given), parameters)
        name, optimizer_class = _find_class(kind)
        if not isinstance(given, dict):
            raise TypeError(f"the arguments of optimizer {name!r} are {given!r}; expected a dict")
        given = dict(given)
        if "lr_scheduler" in given:
            raise ValueError(
                "optimizer_params has 'lr_scheduler'; expected it as an argument of fit, such as fit(..., lr_scheduler="
                "('piecewise', {'epochs': [30, 60], 'factor': 0.1})), see docs/updates.md"
            )
        for argument, value in given.items():
            _check_plain(f"optimizer argument {argument!r}", value)
        ours = {argument: given.pop(argument) for argument in _OURS if argument in given}
        defaults = _defaults(optimizer_class)
        if name == "nag":
            given.setdefault("nesterov", bool(given.get("momentum")))  # torch refuses nesterov without momentum
        arguments = _torch_arguments(name, given, defaults)
        if ours.get("wd_mult") and "weight_decay" not in defaults:
            raise ValueError(f"wd_mult is given, but optimizer {name!r} has no weight decay")
        _check_factors(ours)
        arguments.setdefault("lr", defaults["lr"])
        try:  # torch checks the values now instead of at the first update
            optimizer_class([torch.zeros(1, 1, device="cpu")], **arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"optimizer {name!r} with {arguments} is refused by torch: {error}") from error
        check_learning_rate(arguments["lr"])  # torch accepts NaN and infinity
        return cls(name, optimizer_class, arguments, **ours)

    @classmethod
    def _by_pattern(
        cls, given: Mapping[Any, Any], shared: dict[str, Any], parameters: Mapping[Any, torch.Tensor] | None
    ) -> OptimizerSpec:
        if wrong := [argument for argument in shared if argument not in _OURS]:
            raise ValueError(
                f"{wrong} stand beside patterns of keys; expected them in the arguments of a pattern's optimizer, and "
                f"beside the patterns some of {sorted(_OURS)}"
            )
        _check_factors(shared)
        parts = []
        for pattern, one in given.items():
            part = cls.parse(one)
            if part != cls(part.name, part.optimizer_class, part.arguments):
                raise ValueError(
                    f"the optimizer of pattern {pattern!r} is {one!r}; expected arguments of torch alone, and any of "
                    f"{sorted(_OURS)} beside the patterns, such as ({{pattern: optimizer}}, {{'clip_global_norm': 1}})"
                )
            if callable(pattern):
                function = pattern
                pattern = tuple(key for key, weight in (parameters or {}).items() if function(key, weight))
                if not pattern:
                    raise ValueError(
                        f"pattern {function!r} is true for none of the parameters {list(parameters or ())}; a function "
                        "is for Trainer, Module and LocalSteps, which know the parameters, and a store takes keys"
                    )
            parts.append(replace(part, pattern=pattern, **shared))
        if not parts:
            raise ValueError("the dict of optimizers by pattern is empty; expected one, such as {'*': 'sgd'}")
        if not parts[0].rate and any(part.rate for part in parts):
            raise ValueError("the learning rate of the first pattern is 0, to which the others keep their ratio")
        name = " + ".join(dict.fromkeys(part.name for part in parts))
        return replace(parts[0], name=name, pattern="*", parts=tuple(parts))

    def find(self, key: Key) -> OptimizerSpec | None:
        """Return the optimizer of a key; None if no pattern matches it."""
        if not self.parts:
            return self
        for part in self.parts:
            if key in part.pattern if isinstance(part.pattern, tuple) else fnmatchcase(str(key), str(part.pattern)):
                return part
        return None

    def of(self, key: Key) -> OptimizerSpec:
        """Return the optimizer of a key; ValueError if no pattern matches it."""
        part = self.find(key)
        if part is None:
            patterns = [one.pattern for one in self.parts]
            raise ValueError(f"key {key!r} matches none of the optimizer's patterns {patterns}; '*' matches all others")
        return part

    def names(self, keys: Iterable[Key]) -> dict[str, str]:
        """Return the optimizers' names by key as JSON; empty without patterns."""
        found = {key: self.find(key) for key in keys} if self.parts else {}
        return {json.dumps(key): part.name for key, part in found.items() if part is not None}

    @property
    def rate(self) -> float:
        """The learning rate that the optimizer begins with; with patterns, that of the first."""
        return float(self.arguments["lr"])

    def rate_of(self, part: OptimizerSpec, learning_rate: float) -> float:
        """Return a part's learning rate; it keeps its ratio to the first part's, which is given."""
        return learning_rate if part.rate == self.rate else part.rate * (learning_rate / self.rate)

    @property
    def is_known_class(self) -> bool:
        """True for the classes of torch.optim that gangline knows; only Nesterov's momentum changes a gradient."""
        return self.optimizer_class in _CLASSES.values()

    @property
    def is_elementwise(self) -> bool:
        """True if each element's update depends on its own state only: parts or rows of a tensor are updated alone."""
        return self.is_known_class and self.optimizer_class not in _WHOLE_TENSOR

    @property
    def clips(self) -> bool:
        """True if gradients are clipped."""
        return any(getattr(self, name) is not None for name in THRESHOLDS)

    def needs_whole(self, key: Key) -> bool:
        """Return True if an update needs the key's whole gradient, so that servers must not split the key."""
        part = self.find(key)
        return part is not None and (not part.is_elementwise or part.clip_norm is not None)

    @property
    def takes_dense(self) -> bool:
        """True if dense gradients are supported, of all keys."""
        return all(part.optimizer_class is not torch.optim.SparseAdam for part in self.parts or [self])

    @property
    def optional_arguments(self) -> set[str]:
        """Names of all arguments of torch's class."""
        return set(_defaults(self.optimizer_class))

    def misfit(self, dtype: torch.dtype) -> str | None:
        """Return why keys of a dtype cannot be updated; None if they can."""
        if dtype.is_complex and self.clip_gradient is not None:
            return f"clip_gradient clips real numbers, but it holds {dtype}"
        return None if dtype.is_floating_point or dtype.is_complex else f"it holds {dtype}"

    def factors(self, key: Key) -> tuple[float, float]:
        """Return (lr_mult, wd_mult) of a key."""
        if self.wd_mult == "mxnet":
            decay = 1.0 if str(key).endswith(("weight", "gamma")) else 0.0
        else:
            assert isinstance(self.wd_mult, dict)
            decay = self.wd_mult.get(key, 1.0)
        return self.lr_mult.get(key, 1.0), decay

    def check_keys(self, known: Collection[Key], updated: Iterable[Key]) -> None:
        """Raise ValueError if a factor or a pattern is for none of the known keys, or an updated key has no pattern."""
        names = list(known)
        used = {part.pattern for key in known if (part := self.find(key)) is not None}
        if unused := [part.pattern for part in self.parts if part.pattern not in used]:
            raise ValueError(
                f"patterns {unused} of the optimizer match no key, or only keys that an earlier pattern matches; the "
                f"keys are {names}"
            )
        for key in updated:
            self.of(key)
        for argument, factors in (("lr_mult", self.lr_mult), ("wd_mult", self.wd_mult)):
            unknown = [key for key in factors if key not in names] if isinstance(factors, dict) else []
            if unknown:
                raise ValueError(f"{argument} names {unknown}, which are no parameters; they are {names}")


def _find_class(kind: Any) -> tuple[str, type[torch.optim.Optimizer]]:
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        name = next((n for n, c in _CLASSES.items() if c is kind and n != "nag"), kind.__name__)
        known: type[torch.optim.Optimizer] | None = kind
    elif isinstance(kind, str):
        name = kind.lower()
        known = _CLASSES.get(name)
    else:
        raise TypeError(
            f"optimizer is {kind!r}; expected a name, a torch.optim class, (one of these, arguments), or a dict of "
            "these by patterns of keys"
        )
    reason = _REFUSED.get(name.lower())
    if reason:
        raise ValueError(f"optimizer {name!r} cannot be used: {reason}; expected one of {sorted(_CLASSES)}")
    if known is None:
        raise ValueError(
            f"optimizer {name!r} is unknown;{did_you_mean(name, _CLASSES)} expected one of {sorted(_CLASSES)} or a "
            "torch.optim class"
        )
    return name, known


def _defaults(optimizer_class: type[torch.optim.Optimizer]) -> dict[str, Any]:
    parameters = list(inspect.signature(optimizer_class.__init__).parameters.values())[2:]  # after self, params
    defaults = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if "lr" not in defaults:
        raise ValueError(f"optimizer {optimizer_class.__name__} has no argument lr; expected one that has")
    if defaults["lr"] is inspect.Parameter.empty:
        defaults["lr"] = 0.01
    return defaults


def _torch_arguments(name: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    aliases = _ALIASES | (_RMSPROP_ALIASES if name == "rmsprop" else {})
    known = sorted(
        {a for a in defaults if a not in _NOT_DATA}
        | {mxnet for mxnet, torch_name in aliases.items() if torch_name in defaults}
        | (set(_BETAS) if "betas" in defaults else set())
        | set(_OURS)
    )
    arguments: dict[str, Any] = {}
    for argument, value in given.items():
        if argument not in known:
            raise ValueError(
                f"optimizer {name!r} has no argument {argument!r};{did_you_mean(argument, known)} expected some of "
                f"{known}"
            )
        if argument in _BETAS and "betas" in defaults:
            continue
        torch_name = aliases.get(argument, argument)
        if torch_name in arguments:
            raise ValueError(f"optimizer {name!r} got both {argument!r} and its other name; expected one of them")
        arguments[torch_name] = tuple(value) if isinstance(value, list) else value
    if any(beta in given for beta in _BETAS) and "betas" in defaults:
        if "betas" in arguments:
            raise ValueError(f"optimizer {name!r} got both betas and beta1 or beta2; expected one of them")
        first, second = defaults["betas"]
        arguments["betas"] = (given.get("beta1", first), given.get("beta2", second))
    return arguments


def _check_plain(where: str, value: Any) -> None:
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{where} is {value!r}; expected plain data (numbers, strings, lists or dicts of them)")
    for one in value:
        _check_plain(where, one)


def _check_factors(ours: Mapping[str, Any]) -> None:
    for argument in ("lr_mult", "wd_mult"):
        factors = ours.get(argument, {})
        if argument == "wd_mult" and factors == "mxnet":
            continue
        if not isinstance(factors, dict) or not all(_is_number(f) and f >= 0 for f in factors.values()):
            raise ValueError(f"{argument} is {factors!r}; expected a dict of key -> factor, 0 or more")
    if not _is_number(ours.get("rescale_grad", 1.0)):
        raise ValueError(f"rescale_grad is {ours['rescale_grad']!r}; expected a number")
    check_thresholds(ours)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_learning_rate(value: Any) -> None:
    """Check a learning rate, as `check_not_negative`."""
    check_not_negative("learning rate", value)


def check_not_negative(name: str, value: Any) -> None:
    """Raise TypeError if a value is not a number, ValueError if it is negative, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; expected a number")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} is {value!r}; expected a finite number, 0 or more")
