"""How CNTK 2's examples train each network: rates per sample, momentum as a time constant.

A rate per sample is what one image's gradient is multiplied with in all, whatever its minibatch, as
momentum has unit gain there; a time constant is in images. So the global batch may grow, as with
--batch-per-worker, and both mean the same.
"""

from typing import NamedTuple

import keras
from dtk.callbacks import SampleRate
from dtk.schedules import (
    by_samples,
    learning_rate_from_sample_rate,
    momentum_from_time_constant,
    time_constant_from_momentum,
)


class Recipe(NamedTuple):
    """How a network is trained.

    Attributes:
        minibatch: Images in a global batch.
        epochs: Epochs of 50,000 images.
        rates: Pairs of epochs and rate per sample; the last persists.
        time_constants: Pairs of epochs and time constant; the last persists.
        l2: Of every parameter w, l2 w is added to its gradient.
    """

    minibatch: int
    epochs: int
    rates: list
    time_constants: list
    l2: float

    def stretched(self, epochs):
        """The same within another number of epochs."""
        factor = epochs / self.epochs
        rates, time_constants = (
            [(max(1, round(count * factor)), value) for count, value in pairs]
            for pairs in (self.rates, self.time_constants)
        )
        return self._replace(epochs=epochs, rates=rates, time_constants=time_constants)

    @property
    def time_constant(self):
        """That of the first epochs, for what cannot change it while training."""
        return self.time_constants[0][1]


def constant(momentum, minibatch):
    return [(1, time_constant_from_momentum(momentum, minibatch))]


# Rates of ResNets and of BN-Inception are a minibatch's in CNTK: divided by its size here.
_RESNET = [(80, 1.0 / 128), (40, 0.1 / 128), (40, 0.01 / 128)]
_RESNET20 = Recipe(128, 160, _RESNET, constant(0.9, 128), l2=1e-4)
RECIPES = {
    # 14 % error is what CNTK's page says of it
    "convnet": Recipe(
        minibatch=64,
        epochs=80,
        rates=[(20, 1.5625e-3), (20, 4.6875e-4), (20, 1.5625e-4), (10, 4.6875e-5), (10, 1.5625e-5)],
        time_constants=[(20, 0.0), (20, 600.0), (40, 1200.0)],
        l2=2e-3,
    ),
    "vgg9": Recipe(
        minibatch=64,
        epochs=30,
        rates=[(10, 0.1 / 64), (10, 0.03 / 64), (10, 0.01 / 64)],
        time_constants=constant(0.9, 64),
        l2=1e-4,
    ),
    "resnet20": _RESNET20,
    # one epoch at a tenth, for 110 layers to start
    "resnet110": _RESNET20._replace(rates=[(1, 0.1 / 128), *_RESNET]),
    "bn-inception": Recipe(
        minibatch=128,
        epochs=160,
        rates=[(2, 2.0 / 128 * 0.94**n) for n in range(80)],
        time_constants=constant(0.9, 128),
        l2=1e-4,
    ),
}


def sgd(recipe, batch_size, rows, workers=1, blocks=False, scaled=False):
    """SGD that takes the recipe's steps, and the callbacks it needs.

    Args:
        recipe: A `Recipe`.
        batch_size: Global batch.
        rows: Images of an epoch.
        workers: Number of workers.
        blocks: Whether each worker takes steps of its own, on its rows, as with block momentum.
        scaled: Whether the global batch has grown with the workers, and `LearningRateScaling` is
            going to grow the rate, which is that of one worker here.

    Returns:
        An optimizer and a list of callbacks.
    """
    if not blocks and not scaled:
        callback = SampleRate(recipe.rates, recipe.time_constants, batch_size=batch_size)
        return keras.optimizers.SGD(momentum=0.9), [callback]  # both numbers are the callback's
    # A schedule of Keras's for the rate; there is none for momentum.
    own = max(1, batch_size // workers)
    momentum = momentum_from_time_constant(recipe.time_constant, own)
    rates = [
        (epochs, learning_rate_from_sample_rate(rate, own, momentum))
        for epochs, rate in recipe.rates
    ]
    schedule = by_samples(rates, batch_size, epoch_size=rows)
    return keras.optimizers.SGD(schedule, momentum=momentum), []
