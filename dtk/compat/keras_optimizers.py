"""Private attributes of Keras optimizers, each for itself: one that wraps another is two.

Optimizer   _distribution_strategy, _all_reduce_sum_gradients, _clip_gradients,
            _accumulated_gradients, _learning_rate,
            _trainable_variables_indices, _trainable_variables, _var_key,
            _var_to_optimizer_idx (of a MultiOptimizer)
Muon        _should_use_adamw
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.backend.common.variables import Variable as KerasVariable

# Optimizers, each for itself: one that wraps another is two.


def optimizer_owner(optimizer: keras.Optimizer) -> tf.distribute.Strategy:
    """Return the strategy an optimizer was made under.

    Args:
        optimizer: The optimizer.
    """
    return optimizer._distribution_strategy


def own_optimizer(optimizer: keras.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Make an optimizer belong to a strategy, and take gradients as they are: already reduced.

    Args:
        optimizer: The optimizer.
        strategy: The strategy.
    """
    optimizer._distribution_strategy = strategy
    optimizer._all_reduce_sum_gradients = list


def clip_through(optimizer: keras.Optimizer, around: Callable) -> None:
    """Make an optimizer call `around(gradients, clip)` where it would call `clip(gradients)`.

    With gradient accumulation that is once per window, with the window's sum.

    Args:
        optimizer: The optimizer.
        around: Gets a list of gradients and the optimizer's own clipping; returns a list.
    """
    clip = optimizer._clip_gradients
    optimizer._clip_gradients = lambda gradients: around(gradients, clip)


def trained_variables(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return the Keras variables an optimizer was built for.

    Args:
        optimizer: The optimizer.
    """
    return optimizer._trainable_variables


def accumulated(optimizer: keras.Optimizer) -> list:
    """Return what an optimizer sums up in an accumulation window.

    Args:
        optimizer: The optimizer.

    Returns:
        One variable per trained variable, None where there is none; empty without accumulation.
    """
    return list(getattr(optimizer, "_accumulated_gradients", []))


def given_rate(optimizer: keras.Optimizer) -> Callable[[], tf.Tensor] | None:
    """Return the schedule or function that an optimizer computes its learning rate with.

    Args:
        optimizer: The optimizer.

    Returns:
        Called without arguments if not a `LearningRateSchedule`; None when the rate is a plain
        number.
    """
    rate = optimizer._learning_rate
    return rate if callable(rate) and not isinstance(rate, KerasVariable) else None


def takes_adamw(muon: keras.Optimizer, variable: keras.Variable) -> bool:
    """Return whether a `keras.optimizers.Muon` updates a variable as AdamW does.

    Args:
        muon: The optimizer.
        variable: A Keras variable.
    """
    return muon._should_use_adamw(variable)


def index_variables(optimizer: keras.Optimizer) -> None:
    """Rebuild an optimizer's look-up of its variables after their storage moved.

    Args:
        optimizer: The optimizer.
    """
    optimizer._trainable_variables_indices = {
        optimizer._var_key(v): i for i, v in enumerate(optimizer._trainable_variables)
    }
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        optimizer._var_to_optimizer_idx = {
            optimizer._var_key(v): i
            for i, member in enumerate(optimizer.optimizers)
            for v in member._trainable_variables
        }
