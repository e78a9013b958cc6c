"""What a strategy overrides of a model that is compiled in its scope.

`make_subclass` gives the model a class made of this one and its own. `fit`, `evaluate` and
`predict` are not here: `guard` decides for all models, also for those of no strategy, and what a
script's class overrides of them comes first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import cast

import keras
import tensorflow as tf

from dtk.compat import keras_data, keras_models
from dtk.nests import Tree
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.replica import whole_batch
from dtk.trainer.strategy import Loop


def trainer_of(model: keras.Model) -> DistributedTrainer | None:
    """Return the trainer of a model; None if the model was not compiled under a dtk strategy."""
    return keras_models.trainer_of(model, DistributedTrainer)


class DistributedModel(keras_models.AdoptedModel):
    """A model whose steps are those of all replicas."""

    @property
    def _dtk(self) -> DistributedTrainer:
        return cast(DistributedTrainer, trainer_of(self))

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compile again in the scope that it was compiled in, wherever a script calls it."""
        is_inside = tf.distribute.has_strategy()
        with contextlib.nullcontext() if is_inside else self._dtk.strategy.scope():
            super().compile(*args, **kwargs)

    def _dtk_begin(self, iterator: Iterator[Tree] | None, data_batch: Tree) -> None:
        cut = cast(keras_data.CutEpochIterator | None, iterator)
        self._dtk.take_epoch_iterator(cut, data_batch)

    def compute_loss(self, *args: object, **kwargs: object) -> tf.Tensor | None:
        """Compute the loss of a replica's rows such that those of all replicas add up."""
        return whole_batch.compute_loss(self, super().compute_loss, args, kwargs)

    def make_train_function(self, force: bool = False) -> Loop:
        """Make the loop of train steps, whenever Keras asks for it: once in each call of `fit`."""
        if not self._dtk.takes_over:
            return super().make_train_function(force)
        self._dtk.prepare_step()
        return self._dtk.make_train_function(force)

    def make_test_function(self, force: bool = False) -> Loop:
        """Make the loop of test steps, as above."""
        if not self._dtk.takes_over:
            return super().make_test_function(force)
        self._dtk.prepare_step()
        return self._dtk.make_test_function(force)

    def make_predict_function(self, force: bool = False) -> Callable[[list[Tree]], Tree]:
        """Make the function that predicts batches."""
        if not self._dtk.takes_over:
            return super().make_predict_function(force)
        return self._dtk.make_predict_function(force)
