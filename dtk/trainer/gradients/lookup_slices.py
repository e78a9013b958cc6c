"""Divide sparse gradients by the origin of their slices; see `slice_origins`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import tensorflow as tf

from dtk.errors import NotDistributedError, at_rank
from dtk.exchange.base import Gradient
from dtk.trainer.tracing import traced_step
from dtk.trainer.tracing.slice_origins import LookupSlices, parts_of, pieces_of, whole_of

# Joins exchanged pieces to whole gradients.
Join: TypeAlias = Callable[[list[Gradient]], list[Gradient]]


@dataclass(frozen=True)
class Division:
    """How the sparse gradients of a step are divided."""

    paths: Sequence[str]
    rank: int
    needed: bool = True
    linear: bool = True

    def of(self, gradients: list[Gradient]) -> tuple[list[Gradient], Join]:
        """Return the pieces of gradients to exchange, and the function that joins them again."""
        divided: list[Gradient] = list(gradients)
        more: list[Gradient] = []
        places: dict[int, list[tuple[LookupSlices, int]]] = {}
        for i, (gradient, path) in enumerate(zip(gradients, self.paths, strict=True)):
            if not self.needed or not isinstance(gradient, tf.IndexedSlices):
                continue
            step = traced_step.current()
            pieces = known_pieces(gradient, path, self.rank, self.linear, step)
            first, *others = parts_of(gradient, pieces)
            divided[i] = first
            ends = range(len(gradients) + len(more), len(gradients) + len(more) + len(others))
            places[i] = list(zip(pieces, (i, *ends), strict=True))
            more += others

        def join(found: list[Gradient]) -> list[Gradient]:
            joined = found[: len(gradients)]
            for i, held in places.items():
                joined[i] = whole_of([(piece, found[place]) for piece, place in held])
            return joined

        return [*divided, *more], join


def divide_in_loop(values: list[Gradient]) -> tuple[list[Gradient], Join]:
    """Divide the gradients that a script's own loop reduces, by their graph."""
    return Division([""] * len(values), rank=0).of(values)


def known_pieces(
    gradient: tf.IndexedSlices,
    path: str,
    rank: int,
    linear: bool,
    step: traced_step.Step | None,
) -> list[LookupSlices]:
    """Return the origins of a gradient's slices, as the graph or the self-test shows them."""
    if step is None:
        pieces = pieces_of(gradient.indices)
    else:
        pieces = pieces_of(gradient.indices, step.graph, step.origins)
    if linear or (step is not None and step.tried) or all(piece.sure for piece in pieces):
        return pieces
    eager = tf.executing_eagerly()
    how = (
        "train with run_eagerly=False, or put @tf.function around the step of a loop of your own"
        if eager
        else "compute the indices from constants and the shapes of the data, or from its rows"
    )
    trial = "" if step is None else ", or make the strategy with self_test=True, which tries it"
    raise NotDistributedError(
        at_rank(
            rank,
            f"{path!r} is looked up by indices of which nothing tells whether they belong to rows "
            "of the batch, such as words, or are the same for every row, such as positions: one "
            "process sums slices of the gradient in the second case only, and this optimizer "
            f"squares or clips them one by one. Please {how}{trial}. keras.optimizers.SGD without "
            "clipping makes no difference",
        )
    )
