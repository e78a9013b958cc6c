"""Learning rates and momentum over time: conversions of numbers, and Keras schedules.

Use Keras's own schedules, too: `CosineDecay` warms up by itself; `PolynomialDecay`,
`ExponentialDecay` and `PiecewiseConstantDecay` go into `LearningRateWarmup`. Importing this package
registers `LearningRateWarmup` with Keras: import it before `keras.saving.load_model` reads a model
that was compiled with it.
"""

from dtk.schedules.conversions import (
    learning_rate_from_sample_rate,
    momentum_from_time_constant,
    sample_rate_from_learning_rate,
    time_constant_from_momentum,
)
from dtk.schedules.rates import LearningRateWarmup, by_samples, polynomial_decay, slow_start

__all__ = [
    "LearningRateWarmup",
    "by_samples",
    "learning_rate_from_sample_rate",
    "momentum_from_time_constant",
    "polynomial_decay",
    "sample_rate_from_learning_rate",
    "slow_start",
    "time_constant_from_momentum",
]
