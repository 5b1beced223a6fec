"""Files of tensors: written aside and renamed, refused by name when torn or foreign."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

_HEADER = "gangline"


def write_aside(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    """Write a safetensors file whole and flush it to the disk; rename it with `os.replace` when all is there.

    Args:
        path: the name to write under.
        tensors: on any device; those that share memory are written once each.
        header: plain data for the file's metadata.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    on_host = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(on_host, path, metadata={_HEADER: json.dumps(header)})
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    """Write a safetensors file; ``path`` holds the old content or the new, never a part."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write_aside(aside, tensors, header)
    aside.replace(path)


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the header of a file that gangline wrote.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is torn, or not gangline's.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is torn or no safetensors file: {error}") from error
    if _HEADER not in metadata:
        raise ValueError(
            f"{path} was not written by gangline; expected a file of save_checkpoint or save_optimizer_states"
        )
    return tensors, json.loads(metadata[_HEADER])
