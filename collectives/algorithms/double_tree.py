"""Double binary tree: two trees over all ranks, each for one half of the tensor; no rank is an inner node of both.

In one tree half of the ranks are leaves and forward nothing; those are the inner nodes of the other tree, so that all
ranks send and receive alike. Each half is pipelined in S segments. With depth D, at most floor(log2 p):

| collective | rounds | bytes sent per rank at most (n bytes) |
| --- | --- | --- |
| broadcast, reduce | D + S, with D of the tree of the p - 1 others | n |
| all_reduce | 2 D + S - 1 | 2 n |

As few bytes as a ring (but for a factor p / (p - 1)) in a logarithmic number of rounds: best for many ranks. The trees
follow the hosts: a rank's descendants are its neighbours. The edges of both trees are coloured with two colours such
that, in each colour, a rank has at most one edge up and one down: the ports of all ranks are busy all the time.

Source: P. Sanders, J. Speck, J. L. Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
(2009); their two steps, one per colour, form one round here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gangline.collectives.schedule import IntArray, Rounds, Transfers, transfers


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """Binary tree over ranks; each array has one entry per rank."""

    parent: IntArray
    """-1 for the root."""
    depth: IntArray
    """Number of edges to the root."""


def all_reduce(order: Sequence[int], segments: int = 1) -> tuple[int, Rounds]:
    """All-reduce up each tree and down again; a segment goes down while later ones still go up."""
    edges = _edges(two_trees(order))
    depth = edges.deepest

    def at(number: int) -> Iterator[Transfers]:
        yield from edges.tables(segments, lambda of_child: number - (depth - of_child), up=True)
        yield from edges.tables(segments, lambda of_child: number - depth - (of_child - 1), up=False)

    count = 2 * depth + segments - 1 if len(order) > 1 else 0
    return 2 * segments, Rounds(count, at)


def broadcast(order: Sequence[int], root: int, segments: int = 1) -> tuple[int, Rounds]:
    """Broadcast: the root sends each half to the root of one tree over the other ranks.

    Round i brings segment i - d + 1 to the ranks at depth d.
    """
    if len(order) == 1:
        return 2 * segments, Rounds(0, lambda _: ())
    begin = order.index(root)
    others = [rank - (rank > root) for rank in (*order[begin + 1 :], *order[:begin])]
    first, second = two_trees(others)
    edges = _edges((_below(root, first), _below(root, second)))

    def at(number: int) -> Iterator[Transfers]:
        return edges.tables(segments, lambda of_child: number - (of_child - 1), up=False)

    return 2 * segments, Rounds(edges.deepest + segments - 1, at)


def two_trees(order: Sequence[int]) -> tuple[Tree, Tree]:
    """Return two trees over the ranks of ``order``; a rank that has children in one is a leaf in the other.

    The inner nodes of the first are at positions 1, 3, 5, ... of ``order``. The second is the first, shifted by one
    position.
    """
    tree = _in_order(len(order))
    return _renamed(tree, np.asarray(order)), _renamed(tree, np.roll(np.asarray(order), -1))


def _in_order(size: int) -> Tree:
    """Return a binary search tree over positions: the left subtree precedes a node, the right subtree follows it.

    A subtree begins at an even position and its root is the odd position nearest to its middle, so only odd positions
    have children.
    """
    parent, depth = np.full((2, size), -1)
    parts = [(0, size, -1, 0)]
    while parts:
        begin, end, above, level = parts.pop()
        if begin < end:
            root = min(begin + ((end - begin) // 2 | 1), end - 1)
            parent[root], depth[root] = above, level
            parts += [(begin, root, root, level + 1), (root + 1, end, root, level + 1)]
    return Tree(parent, depth)


def _renamed(tree: Tree, ranks: IntArray) -> Tree:
    """Return the tree with rank i replaced by ``ranks[i]``."""
    place = np.argsort(ranks)
    above = tree.parent[place]
    return Tree(np.where(above < 0, -1, ranks[above]), tree.depth[place])


def _below(root: int, tree: Tree) -> Tree:
    """Return a tree with ``root`` above a tree whose rank i is the i-th of the other ranks."""
    others = np.delete(np.arange(len(tree.parent) + 1), root)
    parent, depth = np.full(len(others) + 1, -1), np.zeros(len(others) + 1, dtype=np.int64)
    parent[others] = np.where(tree.parent < 0, root, others[tree.parent])
    depth[others] = tree.depth + 1
    return Tree(parent, depth)


@dataclass(frozen=True, slots=True, eq=False)
class _Edges:
    """Edges of two trees; each array has one entry per edge."""

    parent: IntArray
    child: IntArray
    depth: IntArray
    """Depth of the child."""
    half: IntArray
    """Number of the tree, and of the half of the tensor."""
    colour: IntArray

    @property
    def deepest(self) -> int:
        return int(self.depth.max(initial=0))

    def tables(self, segments: int, segment_at: Callable[[IntArray], IntArray], *, up: bool) -> Iterator[Transfers]:
        """Return the messages of a round, one table per colour; ``segment_at`` maps a child's depth to its segment."""
        segment = segment_at(self.depth)
        chunk = self.half * segments + segment
        for colour in (0, 1):
            on = (segment >= 0) & (segment < segments) & (self.colour == colour)
            if on.any():
                parent, child = self.parent[on], self.child[on]
                yield transfers(child, parent, chunk[on], reduce=True) if up else transfers(parent, child, chunk[on])


def _edges(trees: tuple[Tree, Tree]) -> _Edges:
    children = [np.flatnonzero(tree.parent >= 0) for tree in trees]
    child = np.concatenate(children)
    parent, depth = (
        np.concatenate([getattr(tree, column)[of_tree] for tree, of_tree in zip(trees, children, strict=True)])
        for column in ("parent", "depth")
    )
    half = np.repeat([0, 1], [len(of_tree) for of_tree in children])
    return _Edges(parent, child, depth, half, _two_colours(parent, child))


def _two_colours(parent: IntArray, child: IntArray) -> IntArray:
    """Return a colour for each edge, such that the two edges at a parent, or at a child, have different colours.

    A path over parents and children by turns either ends or closes after an even number of edges, so two colours
    suffice.
    """
    edges_at: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for edge, (above, below) in enumerate(zip(parent.tolist(), child.tolist(), strict=True)):
        edges_at["parent", above].append(edge)
        edges_at["child", below].append(edge)
    adjacent: list[list[int]] = [[] for _ in child]
    for edges in edges_at.values():
        for edge in edges:
            adjacent[edge] += [other for other in edges if other != edge]
    colours = [-1] * len(child)
    for first in range(len(child)):
        found = [(first, 0)] if colours[first] < 0 else []
        while found:
            edge, colour = found.pop()
            if colours[edge] < 0:
                colours[edge] = colour
                found += [(other, 1 - colour) for other in adjacent[edge]]
    return np.asarray(colours, dtype=np.int64)
