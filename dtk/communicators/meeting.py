"""What ranks tell each other of a collective outside of graphs, before they enter it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

_FEW = 3


class Call(NamedTuple):
    """The collective that a rank is in."""

    name: str
    given: list[str]
    where: str


def a(name: str) -> str:
    """Put the article in front of a name."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def shape_of(tensor: tf.Tensor) -> str:
    """Describe a tensor of which all ranks give as many elements."""
    return f"{tensor.dtype.name} {tensor.shape}"


def rows_of(tensor: tf.Tensor) -> str:
    """Describe a tensor of which ranks may give more or fewer rows."""
    return f"rows of {tensor.dtype.name} {tensor.shape[1:]}"


def differing(places: Sequence[Call]) -> str:
    """Say of each rank which collective it is in, what it gave that others did not, and where.

    >>> places = [Call("broadcast", ["int32 ()", f"root {i}"], "at 7") for i in range(2)]
    >>> differing(places).partition(";")[0]
    'ranks disagree: rank 0 is in a broadcast (root 0), at 7'
    """
    longest = max(len(place.given) for place in places)
    differ = [
        i for i in range(longest) if len({tuple(place.given[i : i + 1]) for place in places}) > 1
    ]
    shown = (differ or range(longest))[:_FEW]
    ranks: dict[str, list[str]] = {}
    for rank, (name, signature, where) in enumerate(places):
        values = [
            f"value {i + 1}: {signature[i]}" if longest > _FEW else signature[i]
            for i in shown
            if i < len(signature)
        ]
        message = f" ({', '.join(values)})" if values else ""
        ranks.setdefault(f"in {a(name)}{message}, {where}", []).append(str(rank))
    said = [
        f"{'rank' if len(own) == 1 else 'ranks'} {', '.join(own)} "
        f"{'is' if len(own) == 1 else 'are'} {what}"
        for what, own in ranks.items()
    ]
    more = f"; and {len(said) - _FEW} more" if len(said) > _FEW else ""
    return (
        f"ranks disagree: {'; '.join(said[:_FEW])}{more}. All ranks must call the same collectives "
        "in the same order, with equal shapes, types, ops and roots: look for calls that only some "
        "ranks make, and for exceptions that only some catch"
    )
