"""Layer-wise adaptive moments (You et al. 2020, arXiv:1904.00962)."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf
from keras import ops

from dtk.nests import Config
from dtk.optimizers.dense import dense
from dtk.optimizers.layerwise import (
    LayerwiseOptimizer,
    LearningRate,
    both_positive,
    check_below_one,
    check_positive,
    norm,
)


@keras.saving.register_keras_serializable(package="dtk")
class LAMB(LayerwiseOptimizer):
    """Adam with a step for each variable of length rate times |w|.

        m = b1 m + (1 - b1) g           mhat = m / (1 - b1^t)
        v = b2 v + (1 - b2) g^2         vhat = v / (1 - b2^t)
        u = mhat / (sqrt(vhat) + epsilon) + decay w
        w = w - rate * (|w| / |u|) * u, with the ratio 1 if |w| or |u| is 0

    Biases and normalizations take plain Adam steps, see `LayerwiseOptimizer`.

    `keras.optimizers.Lamb` differs in two ways: its weight decay is decoupled, `w (1 - rate *
    decay)` before the step, so that the ratio neither sees nor scales it; and it adapts every
    variable, biases and normalizations too. For matrices without decay both are the same. Its
    default epsilon is 1e-7, the paper's 1e-6.

    Sparse gradients of embeddings are made dense: moments, decay and norm involve every row.

    Args:
        learning_rate: A float, a schedule, or a function.
        beta_1: b1, 0.0 up to but below 1.0.
        beta_2: b2, 0.0 up to but below 1.0.
        epsilon: Keeps the division finite, above 0.
        weight_decay: Factor of the weights in the update; None or 0.0 for none.
        exclude: Regular expressions for paths of other variables to skip.
        **kwargs: Arguments of every Keras optimizer: name, clipnorm, use_ema, ...

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> import keras
        >>> w = keras.Variable([[3.0, 4.0]])
        >>> optimizer = LAMB(0.1)
        >>> optimizer.apply([keras.ops.convert_to_tensor([[0.0, 2.0]])], [w])
        >>> w.numpy().round(4).tolist()      # a step of 0.1 |w|
        [[3.0, 3.5]]
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float | None = None,
        exclude: Sequence[str] = (),
        **kwargs: object,
    ):
        super().__init__(learning_rate, exclude=exclude, weight_decay=weight_decay, **kwargs)
        check_below_one("beta_1", beta_1)
        check_below_one("beta_2", beta_2)
        check_positive("epsilon", epsilon)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Make both moments for each variable."""
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )

    def update_step(
        self,
        gradient: tf.Tensor | tf.IndexedSlices,
        variable: keras.Variable,
        learning_rate: tf.Tensor,
    ) -> None:
        update = self._adam(dense(gradient, variable), variable)
        update += self.decay_of(variable) * variable
        step = ops.cast(learning_rate, variable.dtype) * update
        if self.adapts(variable):
            weights, length = norm(variable), norm(update)
            step *= ops.cast(both_positive(weights, length, weights / length), variable.dtype)
        self.assign_sub(variable, step)

    def _adam(self, gradient: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
        index = self._get_variable_index(variable)
        m, v = self._momentums[index], self._velocities[index]
        self.assign_add(m, (1.0 - self.beta_1) * (gradient - m))
        self.assign_add(v, (1.0 - self.beta_2) * (ops.square(gradient) - v))
        t = ops.cast(self.iterations + 1, variable.dtype)
        mhat = m / (1.0 - ops.power(ops.cast(self.beta_1, variable.dtype), t))
        vhat = v / (1.0 - ops.power(ops.cast(self.beta_2, variable.dtype), t))
        return mhat / (ops.sqrt(vhat) + self.epsilon)

    def get_config(self) -> Config:
        """Return the constructor's arguments, as Keras saves them."""
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
        }
