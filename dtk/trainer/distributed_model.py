"""Make every model that is compiled in `strategy.scope()` a `DistributedModel` with a trainer.

The model gets a class made of `DistributedModel` and its own, see `made_classes`. `fit`, `evaluate`
and `predict` are not in it: `guard` decides for all models, also for those of no strategy, and what
a script's class overrides of them comes first. Once the scope is left, `compile` of other models
and the losses are Keras's again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import cast

import keras
import tensorflow as tf

from dtk.compat import keras_data, keras_models, keras_optimizers
from dtk.compat.made_classes import make_subclass
from dtk.errors import NotDistributedError, at_rank
from dtk.nests import Function, Tree
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.ranks import rank_checks, shared_weights
from dtk.trainer.replica import compiled_step, whole_batch
from dtk.trainer.strategy import Loop, Strategy
from dtk.trainer.tracing import traced_step

_STEPS = ("train_step", "test_step", "predict_step")


def trainer_of(model: keras.Model) -> DistributedTrainer | None:
    """Return the trainer of a model; None if the model was not compiled under a dtk strategy."""
    return getattr(model, "_dtk_trainer", None)


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


# Which models are, and become, distributed.


def distribute(model: keras.Model, strategy: Strategy) -> DistributedTrainer:
    """Give a compiled model the strategy's step functions; compiling again starts afresh."""
    before = trainer_of(model)
    if before is not None and before.strategy is not strategy:
        message = (
            f"model {model.name!r} was compiled under another strategy; build a new one for this"
        )
        raise ValueError(at_rank(strategy.rank, message))
    strategy.take_variables(model.variables)
    trainer = before or strategy.make_trainer(model)
    trainer.bind_optimizers()
    for optimizer in shared_optimizer.optimizers_of(model):
        keras_optimizers.saved_numbers(optimizer)  # made now, so that a file's find their place
    trainer.compiled()
    if before is not None:
        return before
    vars(model)["_dtk_trainer"] = trainer
    make_subclass(model, DistributedModel)
    return trainer


@contextlib.contextmanager
def distributing(strategy: Strategy) -> Iterator[None]:
    """Return a context in which `compile` makes trainers; see `losses_unscaled` for its losses."""
    with (
        keras_models.patch_compile(
            lambda model, jit_compile: check_and_own(model, jit_compile, strategy),
            lambda model: distribute(model, strategy),
        ),
        traced_step.losses_unscaled(),
    ):
        yield


def check_and_own(
    model: keras.Model, jit_compile: bool | str | None, strategy: Strategy
) -> bool | str | None:
    """Make a strategy own a model before `compile`; return the `jit_compile` to use."""
    jit_compile = compiled_step.settle(jit_compile, model, strategy)
    owner = keras_models.owner_of(model)
    if owner is not None and owner is not strategy:
        message = (
            f"model {model.name!r} was built under another strategy "
            f"({type(owner).__name__}); build and compile it under the same one"
        )
        raise ValueError(at_rank(strategy.rank, message))
    keras_models.set_owner(model, strategy)
    return jit_compile


@tf.autograph.experimental.do_not_convert  # `run` is called in graphs; rewriting this took 0.1 s
def check_distributed(function: Function[Tree], strategy: Strategy) -> None:
    """Refuse to run the step of a model compiled outside the scope, or of legacy Keras."""
    if strategy.num_replicas_in_sync == 1:
        return
    python, steps = getattr(function, "python_function", function), ("run_step", *_STEPS)
    home = str(getattr(python, "__module__", "")).partition(".")[0]
    if home == "tf_keras" and getattr(python, "__name__", "") in steps:
        message = (
            "this model is one of legacy Keras (tf_keras, which tf.keras is under "
            "TF_USE_LEGACY_KERAS=1), and dtk distributes models of Keras 3: legacy Keras would "
            "weigh the parts of a batch alike, whatever their rows. Unset TF_USE_LEGACY_KERAS and "
            "use keras, or train legacy Keras by tf.distribute.MultiWorkerMirroredStrategy"
        )
        raise NotDistributedError(at_rank(strategy.rank, message))
    model, name = getattr(function, "__self__", None), getattr(function, "__name__", None)
    if isinstance(model, keras.Model) and name in _STEPS and trainer_of(model) is None:
        message = (
            f"model {model.name!r} was compiled outside strategy.scope(), so its steps would "
            "not be exact; call model.compile(...) inside `with strategy.scope():`"
        )
        raise NotDistributedError(at_rank(strategy.rank, message))


def check_weights(model: keras.Model, strategy: Strategy) -> int:
    """Compare a model's weights over all replicas; see `DtkStrategy.check_weights`."""
    trainer = trainer_of(model)
    if trainer is None or trainer.strategy is not strategy:
        message = (
            f"model {getattr(model, 'name', model)!r} was not compiled under this strategy, "
            "which keeps no weights of it equal; compile it inside strategy.scope()"
        )
        raise ValueError(at_rank(strategy.rank, message))
    variables = trainer.equal_variables()
    # Compare number and shapes first: unequal ones cannot be compared by value.
    if strategy.communicator.size > 1:
        rank_checks.compare(rank_checks.shapes_of(trainer, variables), strategy.communicator)
    shared_weights.check_same_weights(trainer, "when asked")
    return len(variables)
