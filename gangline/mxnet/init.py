"""`mx.init`: gangline's initializers by MXNet's names and arguments; random numbers are torch's."""

from __future__ import annotations

from typing import Any

Initializer = tuple[str, dict[str, Any]]


def Uniform(scale: float = 0.07) -> Initializer:  # noqa: N802  MXNet's names, also below
    """Return weights between -scale and scale."""
    return "uniform", {"scale": scale}


def Normal(sigma: float = 0.01) -> Initializer:  # noqa: N802
    """Return normal weights with a standard deviation."""
    return "normal", {"sigma": sigma}


def Orthogonal(scale: float = 1.414) -> Initializer:  # noqa: N802
    """Return orthogonal weights times a scale."""
    return "orthogonal", {"scale": scale}


def Xavier(rnd_type: str = "uniform", factor_type: str = "avg", magnitude: float = 3) -> Initializer:  # noqa: N802
    """Return weights of the scale sqrt(magnitude / factor), by the number of inputs, of outputs or their mean."""
    return "xavier", {"rnd_type": rnd_type, "factor_type": factor_type, "magnitude": magnitude}


def MSRAPrelu(factor_type: str = "avg", slope: float = 0.25) -> Initializer:  # noqa: N802
    """Return `Xavier`'s gaussian weights for rectifiers with a slope."""
    return "msraprelu", {"factor_type": factor_type, "slope": slope}


def Constant(value: float = 0.0) -> Initializer:  # noqa: N802
    """Return weights of one value."""
    return "constant", {"value": value}


def Zero() -> Initializer:  # noqa: N802
    """Return weights of 0."""
    return Constant(0)


def One() -> Initializer:  # noqa: N802
    """Return weights of 1."""
    return Constant(1)
