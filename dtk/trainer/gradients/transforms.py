"""The chain of transforms from a replica's gradients to those that its optimizer applies.

    StaticShapes    of their variables, which buckets need
    AsFactors       products that may travel as their factors
    ZeroIfPadding   a replica without rows of its own counts as nothing
    Unscale         from the scale of the loss, which changes from step to step
    ExchangeStep    over the replicas: their sum, or what the strategy's exchange makes of it
    Rescale         to the scale that the optimizer expects

Each is a value with one method, `update`; see `GradientExchange.update` for which a step has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

from dtk.communicators.base import with_values
from dtk.compat import tf_replicas
from dtk.exchange.base import BatchPart, ExchangeOp, Gradient, Update
from dtk.exchange.factors import factored
from dtk.trainer.gradients import lookup_slices


class Transform(Protocol):
    """One link of the chain."""

    def update(self, given: Update) -> Update:
        """Transform a step's gradients."""


def chained(transforms: Iterable[Transform], gradients: list[Gradient]) -> Update:
    """Send gradients through a chain."""
    update = Update(gradients)
    for transform in transforms:
        update = transform.update(update)
    return update


@dataclass(frozen=True)
class StaticShapes:
    """Give gradients the static shapes of their variables.

    Without them each gradient is sent by itself. Where a batch may be of any size, those of a Dense
    layer on sequences have none.
    """

    shapes: tuple[tf.TensorShape, ...]

    def update(self, given: Update) -> Update:
        """See `Transform.update`."""
        pairs = zip(given.gradients, self.shapes, strict=True)
        return given._replace(
            gradients=[
                g if isinstance(g, tf.IndexedSlices) else tf.ensure_shape(g, shape)
                for g, shape in pairs
            ]
        )


@dataclass(frozen=True)
class AsFactors:
    """Take gradients apart into factors, where they are products; see `dtk.exchange.factors`."""

    def update(self, given: Update) -> Update:
        """See `Transform.update`."""
        return given._replace(gradients=[factored(g) for g in given.gradients])


@dataclass(frozen=True)
class Observe:
    """Show gradients to a function, and change nothing."""

    see: Callable[[list[Gradient]], None]

    def update(self, given: Update) -> Update:
        """See `Transform.update`."""
        self.see(given.gradients)
        return given


@dataclass(frozen=True)
class ZeroIfPadding:
    """Replace gradients by zeros where this replica has computed a padding row."""

    def update(self, given: Update) -> Update:
        """See `Transform.update`."""
        return given._replace(gradients=tf_replicas.if_present(given.gradients))


@dataclass(frozen=True)
class Unscale:
    """Divide gradients by the scale of the loss.

    They are not multiplied by 1 / scale, which may be too small a number.
    """

    scale: tf.Tensor

    def update(self, given: Update) -> Update:
        """See `Transform.update`."""
        return _each(tf.divide, given, self.scale)


@dataclass(frozen=True)
class Rescale:
    """Multiply gradients by the scale of the loss."""

    scale: tf.Tensor

    def update(self, given: Update) -> Update:
        """See `Transform.update`."""
        return _each(tf.multiply, given, self.scale)


@dataclass(frozen=True)
class ExchangeStep:
    """Exchange gradients with the other replicas."""

    op: ExchangeOp
    part: BatchPart | None
    slices: lookup_slices.Division

    def update(self, given: Update) -> Update:
        """See `Transform.update`."""
        divided, join = self.slices.of(given.gradients)
        found = self.op.update(divided, self.part)
        return found._replace(gradients=join(found.gradients))


@dataclass(frozen=True)
class ReduceWindow:
    """Sum gradients over the replicas where an accumulation window closes."""

    op: ExchangeOp
    part: BatchPart | None
    slices: lookup_slices.Division

    def update(self, given: Update) -> Update:
        """See `Transform.update`."""
        divided, join = self.slices.of(given.gradients)
        return given._replace(gradients=join(self.op.reduce(divided, self.part)))


def _each(
    operation: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], given: Update, scale: tf.Tensor
) -> Update:
    return given._replace(gradients=[_scaled(operation, g, scale) for g in given.gradients])


def _scaled(
    operation: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], gradient: Gradient, scale: tf.Tensor
) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return with_values(gradient, _scaled(operation, gradient.values, scale))
    return operation(gradient, tf.cast(scale, gradient.dtype))
