"""Text for language models that every Python has: the documentation of its language, by characters."""

from __future__ import annotations

import torch

from gangline.models.data.datasets import Splits


def python_documentation(length: int = 64, dtype: torch.dtype = torch.int64) -> Splits:
    """Return the text of Python's `help` topics (about 700,000 characters) in pieces; the last tenth is held out.

    Data are characters, (pieces, length), as numbers of the sorted alphabet; labels are the next characters.

    Args:
        length: characters of a piece.
        dtype: dtype of both.
    """
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([numbers[character] for character in text], dtype=dtype)
    count = (len(tokens) - 1) // length
    data, label = tokens[: count * length].view(count, length), tokens[1 : count * length + 1].view(count, length)
    held_out = count - count // 10
    return Splits((data[:held_out], label[:held_out]), (data[held_out:], label[held_out:]), len(numbers))
