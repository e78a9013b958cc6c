"""Keep values of variables, and put them back bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import keras
import tensorflow as tf

from dtk.compat import keras_variables
from dtk.nests import Array
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.replica import replica_step


class Snapshot:
    """Values of some variables, Keras's or TensorFlow's, on this process's replicas.

    Each replica gets its own value back, even where values differ by replica (metric state, dropout
    seeds, unfinished gradient accumulation). Nothing is communicated.

    Example:
        >>> import keras
        >>> variable = keras.Variable([1.0, 2.0])
        >>> before = Snapshot([variable])
        >>> variable.assign([3.0, 4.0]) is None
        False
        >>> before.restore()
        >>> variable.numpy().tolist()
        [1.0, 2.0]
    """

    def __init__(self, variables: Iterable[keras.Variable | tf.Variable]):
        self._kept: dict[int, tuple[tf.Variable, Array]] = {}
        for variable in variables:
            self.keep(variable)

    def keep(self, variable: keras.Variable | tf.Variable) -> None:
        """Keep the value of one more variable; a value kept before stays."""
        for copy in keras_variables.components(_stored(variable)):
            self._kept.setdefault(id(copy), (copy, copy.numpy()))

    def restore(self) -> None:
        """Assign the values back."""
        for copy, value in self._kept.values():
            copy.assign(value)


def _stored(variable: keras.Variable | tf.Variable) -> tf.Variable:
    return keras_variables.stored(variable) if isinstance(variable, keras.Variable) else variable


def changed_by_training(model: keras.Model) -> list[keras.Variable | tf.Variable]:
    """Return every variable that a training step may change.

    Weights, seeds, metrics, and the state of optimizers and of the gradient exchange.
    """
    optimizers = shared_optimizer.optimizers_of(model)
    of_optimizers = [v for optimizer in optimizers for v in optimizer.variables]
    remembered = [
        v for e in shared_optimizer.gradient_exchanges_of(model) for v in e.state.variables
    ]
    return [*model.variables, *replica_step.metric_variables(model), *of_optimizers, *remembered]
