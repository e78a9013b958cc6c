"""The base of all exchanges, which decide what workers send each other, and when.

An exchange is a value, such as `Quantized(bits=1)`. For each list of trained variables it makes an
`ExchangeOp`, which holds the state between steps and adds the exchange's ops to a step:

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
    """The variables that an optimizer trains, and its momentum variables."""

    variables: Sequence[tf.Variable] = ()  # in the order of their gradients
    momenta: Sequence[tf.Variable] = ()  # the optimizer's averages of gradients, if it has any


class BatchPart(NamedTuple):
    """This rank's part of a step's global batch."""

    rows: tf.Tensor  # rows of the global batch, int64 scalar
    example_weight: tf.Tensor  # this rank's part of these rows, float64; the sum over ranks is 1


class Update(NamedTuple):
    """The gradients that an optimizer applies in a step."""

    gradients: list[Gradient]  # same order, shapes and dtypes as the given gradients
    # whether to apply them, bool scalar; None: always
    applied: tf.Tensor | None = None


class Exchange(abc.ABC):
    """A way to send gradients or weights between workers.

    With one worker every exchange is the identity.

    Attributes:
        local: Whether workers also take local steps, so that weights differ between ranks after
            some steps.
        remembers: Whether a part of a step's gradients is added to a later step's gradients.
    """

    local = False
    remembers = False

    @abc.abstractmethod
    def init(
        self, communicator: Communicator, state: ExchangeState, trained: Trained
    ) -> ExchangeOp:
        """Make the op that exchanges one list of gradients.

        Args:
            communicator: Between the workers.
            state: Holds the op's variables.
            trained: The variables of the gradients.

        Returns:
            An op of the same kind on all ranks.
        """

    def check(self, communicator: Communicator) -> None:  # noqa: B027
        """Refuse a communicator with too many workers, or one that cannot sum the exchange's dtype.

        Args:
            communicator: Between the workers.

        Raises:
            ValueError: The exchange cannot work; the message says what to do.
        """


class ExchangeOp(abc.ABC):
    """Exchanges one list of gradients; the same list, in the same order, at every step.

    Every rank calls it at every step. Sums are the same on all ranks, bit for bit.
    """

    factors = False

    def __init__(self, communicator: Communicator, state: ExchangeState):
        self.communicator = communicator
        self.state = state

    @abc.abstractmethod
    def reduce(self, gradients: list[Gradient], part: BatchPart | None = None) -> list[Gradient]:
        """Sum gradients over all ranks."""

    def update(self, gradients: list[Gradient], part: BatchPart | None = None) -> Update:
        """Exchange this step's gradients; return those for the optimizer to apply now."""
        return Update(self.reduce(gradients, part))

    def count(self, part: BatchPart | None) -> None:  # noqa: B027
        """Count a step's batch, after every step."""

    def count_exact(self, part: BatchPart) -> None:  # noqa: B027
        """Count a step whose gradients another op has summed, in place of `count`."""

    def together(self) -> tf.Tensor | None:
        """Return whether all ranks hold the same weights now; None if they always do."""
        return None

    def averaging_weight(self) -> tf.Tensor | None:
        """Return this rank's weight in a mean over ranks, right after weights became equal."""
        return None

    def close(self) -> None:  # noqa: B027
        """Make all ranks hold the same weights. All ranks call it together."""
