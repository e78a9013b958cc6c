"""Decide for each call of `fit` and its like: make it distributed, leave it alone, or refuse it.

In a job of several processes, a model that was compiled outside `strategy.scope()` would silently
train alone in each process. So the calls of all models go through here, from the first strategy on:

    compiled in a scope                  with the checks of `fit_calls`
    built, or called, in a scope         gets a trainer now, then the same
    others, in a job of one process      plain Keras
    others, training                     NotDistributedError, except inside `undistributed()`
    others, evaluating and predicting    plain Keras: every rank computes all rows
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import keras
import tensorflow as tf

from dtk.compat import keras_models
from dtk.errors import NotDistributedError, at_rank
from dtk.nests import Args, Function, Kwargs
from dtk.trainer import (
    distributed_trainer,
    fit_calls,
    model_scope,
    saving,
    trainer_calls,
    undistributed_jobs,
)
from dtk.trainer.replica import self_test, step_times
from dtk.trainer.strategy import Strategy

# One flag per thread: models that other threads train are not affected.
_alone = threading.local()


@contextlib.contextmanager
def undistributed() -> Iterator[None]:
    """Return a context in which models without a strategy train in this process alone.

    In a job of several processes, dtk refuses `fit` of a model that was not compiled inside
    `strategy.scope()`: every process would train its own model. Use this context where you want
    that, for example to train a reference on rank 0:

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer="sgd", loss="mse")
        >>> with undistributed():
        ...     history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    """
    undistributed_jobs.made_strategy()  # the script trains alone on purpose
    before = is_alone()
    _alone.flag = True
    try:
        yield
    finally:
        _alone.flag = before


def is_alone() -> bool:
    """Return whether this thread is inside `undistributed()`."""
    return getattr(_alone, "flag", False)


class _Calls:
    """Handler of the calls of this process."""

    def __init__(self, strategy: Strategy):
        self.strategy = strategy

    def __call__(
        self, model: keras.Model, name: str, method: Function[object], args: Args, kwargs: Kwargs
    ) -> object:
        found = model_scope.trainer_of(model) or self._distributed_now(model, name)
        if found is not None:
            return fit_calls.call(found, name, method, args, kwargs)
        if name in ("fit", "train_on_batch") and not is_alone():
            self._refuse(model, name)
        return method(*args, **kwargs)

    def _distributed_now(
        self, model: keras.Model, name: str
    ) -> distributed_trainer.DistributedTrainer | None:
        """Make the trainer of a model that was built, or is called, in a scope."""
        owner = keras_models.owner_of(model)
        current = tf.distribute.get_strategy()
        strategy = owner if owner is not None else current
        compiled_enough = model.compiled or name.startswith("predict")
        if not hasattr(strategy, "make_trainer") or not compiled_enough:
            return None
        if owner is None and is_alone():
            return None
        settled = model_scope.check_and_own(
            model, model.jit_compile if model.compiled else "auto", strategy
        )
        if not model.compiled:
            model.jit_compile = settled
        return model_scope.distribute(model, strategy)

    def _refuse(self, model: keras.Model, name: str) -> None:
        strategy = self.strategy
        if strategy.processes == 1:
            return
        raise NotDistributedError(
            at_rank(
                strategy.rank,
                f"{name} of model {model.name!r}, which was compiled outside strategy.scope(): "
                f"each of the {strategy.processes} processes would train a model of its own. Call "
                "model.compile(...) (or load the model) inside `with strategy.scope():`; to train "
                "in this process alone, call fit inside `with dtk.strategies.undistributed():`",
            )
        )


def joining_strategy() -> Strategy | None:
    """Return the strategy with the most processes; None before the first is made."""
    handler = trainer_calls.handler()
    return handler.strategy if isinstance(handler, _Calls) else None


def install(strategy: Strategy) -> None:
    """Make all calls of `fit` and its like go through here. Every new strategy calls this."""
    if strategy.processes > 1:
        saving.install()
    self_test.fail_if_nothing_is_tried()
    step_times.fail_if_nothing_is_timed()
    before = trainer_calls.handler()
    # The strategy with the most processes and replicas decides what is refused.
    if not isinstance(before, _Calls) or _joins(strategy) >= _joins(before.strategy):
        trainer_calls.through(_Calls(strategy))


def _joins(strategy: Strategy) -> tuple[int, int]:
    return strategy.processes, strategy.size
