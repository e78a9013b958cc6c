"""Receivers of a step's gradients, for optimizers that only note them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import keras

from dtk.nests import Gradients


class Applied(NamedTuple):
    """Gradients that a step handed to an optimizer, weighed by the replica's share."""

    optimizer: keras.Optimizer
    gradients: Gradients
    variables: list[keras.Variable]


class Noting(Protocol):
    """Receiver of the gradients of a step whose optimizers only note them."""

    applied: list[Applied]  # in order

    def note(
        self, optimizer: keras.Optimizer, gradients: Gradients, variables: list[keras.Variable]
    ) -> None:
        """Note gradients that an optimizer is given."""


class Gathered:
    """A list of a step's gradients."""

    def __init__(self) -> None:
        self.applied: list[Applied] = []

    def note(
        self, optimizer: keras.Optimizer, gradients: Gradients, variables: list[keras.Variable]
    ) -> None:
        """See `Noting.note`."""
        self.applied.append(Applied(optimizer, gradients, variables))
