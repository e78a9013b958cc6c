"""The contract every exchange keeps: what is sent between workers, and when.

An exchange is a value, such as `Quantized(bits=1)`. For each list of variables that is trained it
makes an `ExchangeOp`, which holds what has to be remembered from step to step and puts the ops into
a step:

    this rank's part of the gradients  ->  op  ->  their sum over all ranks  ->  optimizer
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.exchange.factors import Factored
from dtk.exchange.state import ExchangeState

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | Factored


class Trained(NamedTuple):
    """Variables that an optimizer trains, and its own of them."""

    variables: Sequence[tf.Variable] = ()  # tensorFlow variables, in the order of their gradients
    momenta: Sequence[tf.Variable] = ()  # the optimizer's own averages of gradients, if it has any


class BatchPart(NamedTuple):
    """This rank's part of a step's global batch."""

    rows: tf.Tensor  # rows of the global batch, int64 scalar
    example_weight: tf.Tensor  # this rank's part of them, float64 scalar; all ranks' add up to 1


class Update(NamedTuple):
    """What an optimizer is to apply in a step."""

    gradients: list[Gradient]  # in the order, shapes and dtypes of those that were given
    # whether they are to be applied, bool scalar; None where they always are
    applied: tf.Tensor | None = None


class Exchange(abc.ABC):
    """A way to send gradients or weights between workers.

    With one worker every exchange is the identity.

    Attributes:
        local: Whether workers also take steps of their own, so that weights are equal on all ranks
            at times only.
        remembers: Whether something of a step's gradients is added to a later step's.
    """

    local = False
    remembers = False

    @abc.abstractmethod
    def init(
        self, communicator: Communicator, state: ExchangeState, trained: Trained
    ) -> ExchangeOp:
        """Make what exchanges one list of gradients.

        Args:
            communicator: Between the workers.
            state: Where it remembers.
            trained: What the gradients are for.

        Returns:
            An op, the same kind on all ranks.
        """

    def check(self, communicator: Communicator) -> None:  # noqa: B027
        """Refuse workers it cannot work with: too many, or joined by what cannot add its sums up.

        Args:
            communicator: Between the workers.

        Raises:
            ValueError: With the cure.
        """


class ExchangeOp(abc.ABC):
    """Exchanges one list of gradients; the same list, in the same order, at every step.

    Every rank calls it at every step. Sums are the same on all of them, bit for bit.
    """

    factors = False

    def __init__(self, communicator: Communicator, state: ExchangeState):
        self.communicator = communicator
        self.state = state

    @abc.abstractmethod
    def reduce(self, gradients: list[Gradient], part: BatchPart | None = None) -> list[Gradient]:
        """Sum gradients over all ranks."""

    def update(self, gradients: list[Gradient], part: BatchPart | None = None) -> Update:
        """Turn this step's gradients into those that the optimizer is to apply now."""
        return Update(self.reduce(gradients, part))

    def count(self, part: BatchPart | None) -> None:  # noqa: B027
        """Note, after every step, of which batch it was."""

    def count_exact(self, part: BatchPart) -> None:  # noqa: B027
        """Note a step whose gradients another op has summed, in place of `count`."""

    def together(self) -> tf.Tensor | None:
        """Return whether all ranks hold the same weights now; None where they always do."""
        return None

    def averaging_weight(self) -> tf.Tensor | None:
        """Return what this rank counts in a mean over ranks that have just become equal."""
        return None

    def close(self) -> None:  # noqa: B027
        """Make all ranks hold the same weights. All ranks call it together."""
