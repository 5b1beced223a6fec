"""Large frames to a server or the scheduler travel in pieces, since ZeroMQ bounds frames the same for all peers."""

from __future__ import annotations

from collections.abc import Sequence

PIECE = 8 << 20
"""Maximum bytes of a frame over ZeroMQ, which reads as much of a process that has not shown the job key."""


def split(frames: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return frames of at most PIECE bytes, from which `joined` makes the original ones."""
    pieces: list[bytes | memoryview] = []
    for frame in frames:
        whole = memoryview(frame)
        pieces.extend(whole[begin : begin + PIECE] for begin in range(0, len(whole) + 1, PIECE))
    return pieces


def joined(pieces: list[memoryview]) -> list[memoryview]:
    """Return the frames of the pieces that have come: a frame goes on after each piece of PIECE bytes."""
    if all(len(piece) < PIECE for piece in pieces):
        return pieces
    frames: list[memoryview] = []
    begun = bytearray()
    for piece in pieces:
        if len(piece) == PIECE:
            begun += piece
        elif begun:
            frames.append(memoryview(begun + piece))
            begun = bytearray()
        else:
            frames.append(piece)
    return frames
