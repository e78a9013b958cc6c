"""The checks around `fit`, `evaluate` and `predict` on every rank. Public Keras names only.

Ranks compare the data and callbacks they were given, the progress bar and callbacks that write
files run on rank 0 only, and `rank_callbacks.RankChecks` joins the callbacks.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import SupportsIndex, cast

import keras

from dtk.errors import at_rank, check_number
from dtk.nests import Args, Function, Kwargs
from dtk.trainer import rank_callbacks
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.ranks import rank_checks, seeds, shared_weights
from dtk.trainer.strategy import Strategy

# Keras's own callbacks that write files or talk to a server: once per job, not once per rank.
WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


# For each argument: the expected value in words, and the least value.
_COUNTS = {
    **dict.fromkeys(("batch_size", "validation_batch_size"), ("rows of all ranks, 1 or more", 1)),
    **dict.fromkeys(
        ("steps_per_epoch", "validation_steps", "steps"), ("a number of steps, 1 or more", 1)
    ),
    **dict.fromkeys(("epochs", "initial_epoch"), ("a number of epochs, 0 or more", 0)),
}


def call(
    trainer: DistributedTrainer, name: str, method: Function[object], args: Args, kwargs: Kwargs
) -> object:
    """Call one of Keras's own methods with the checks between ranks around it."""
    if name in ("fit", "evaluate", "predict"):
        asked = inspect.signature(method).bind(*args, **kwargs).arguments
        _check_numbers(name, asked, trainer.strategy)
        _check_callbacks(name, asked.get("callbacks"), trainer.strategy)
        _tell_of_idle(asked.get("batch_size"), trainer.strategy)
        trainer.strategy.meet(f"{name} begins")
    if name == "fit":
        trainer.before_fit(method, args, kwargs)
        return fit(method, trainer, args, kwargs)
    if name in ("evaluate", "predict"):
        return _evaluate_or_predict(method, name, trainer, args, kwargs)
    if name == "predict_on_batch" and trainer.takes_over:
        method = trainer.predict_on_batch
    return _on_batch(method, name, trainer, args, kwargs)


def _tell_of_idle(rows: object, strategy: Strategy) -> None:
    """Print once that a batch has fewer rows than there are replicas."""
    whole, replicas = _whole(rows), strategy.num_replicas_in_sync
    idle = 0 if whole is None else replicas - whole
    if idle > 0 and strategy.is_chief and not strategy.told_of_idle:
        strategy.told_of_idle = True
        text = f"batch_size={whole} leaves {idle} of {replicas} workers without rows in every step"
        print(f"dtk: {text}; use {replicas} or more", file=sys.stderr, flush=True)


def _check_numbers(name: str, asked: Mapping[str, object], strategy: Strategy) -> None:
    """Refuse numbers that would make Keras fail later, or train nothing."""
    for argument, (expected, least) in _COUNTS.items():
        value = asked.get(argument)
        if value is None and argument != "epochs":
            continue
        whole = _whole(value)
        if argument in asked and (whole is None or whole < least):
            told = f"{name} got {argument}={value!r}; expected {expected}"
            raise ValueError(at_rank(strategy.rank, told))
    if asked.get("validation_split"):
        expected = "a part of the rows, 0.0 up to but below 1.0"
        told = at_rank(strategy.rank, f"{name} got validation_split")
        check_number(told, asked["validation_split"], expected, lambda part: 0.0 <= part < 1.0)


def _check_callbacks(name: str, given: object, strategy: Strategy) -> None:
    """Refuse objects that are not callbacks, such as a class in place of an instance."""
    for one in keras.tree.flatten(given or []):
        if not hasattr(type(one), "set_model"):
            cure = f"; write {one.__name__}(...)" if isinstance(one, type) else ""
            told = (
                f"{name} got {one!r} in callbacks; expected instances of keras.callbacks.Callback"
            )
            raise ValueError(at_rank(strategy.rank, told + cure))


def _whole(value: object) -> int | None:
    """Return a whole number (Python's, NumPy's or a tensor) as an int; None for all else."""
    try:
        return None if isinstance(value, bool) else operator.index(cast(SupportsIndex, value))
    except (TypeError, AttributeError):  # AttributeError: tensors of other types
        return None


def fit(
    method: Function[object], trainer: DistributedTrainer, args: Args, kwargs: Kwargs
) -> object:
    """Call Keras's `fit` with the checks between ranks around it."""
    given = inspect.signature(method).bind(*args, **kwargs)
    given.apply_defaults()
    asked, strategy = given.arguments, trainer.strategy
    if trainer.leaves_validation(asked):
        asked["validation_data"] = None
    callbacks = asked["callbacks"]
    listed = isinstance(callbacks, keras.callbacks.CallbackList)
    every_batch = rank_checks.check_same_call(
        strategy,
        {"training data": data_of(asked), "validation data": asked["validation_data"]},
        callbacks.callbacks if listed else keras.tree.flatten(callbacks or []),
    )
    trainer.synchronize_weights()
    last = rank_callbacks.RankChecks(trainer, every_batch)
    if listed:
        join(callbacks, last, {"epochs": asked["epochs"], "steps": None, "verbose": 0})
    else:
        asked["verbose"] = asked["verbose"] if strategy.is_chief else 0
        callbacks = keras.callbacks.CallbackList(
            [
                rank_callbacks.SynchronizeWeights(trainer),
                *with_history(on_this_rank(callbacks, strategy)),
                last,
                *_bar(callbacks, trainer, shown=asked["verbose"] != 0),
            ],
            add_history=True,
            add_progbar=asked["verbose"] != 0,
            model=trainer.model,
            verbose=asked["verbose"],
            epochs=asked["epochs"],
            steps=None,
        )
    asked["callbacks"] = trainer.callbacks = callbacks
    try:
        history = method(*given.args, **given.kwargs)
        seeds.share_seeds(trainer)
        return history
    finally:
        rank_callbacks.notify(callbacks.callbacks, "on_fit_left")
        trainer.callbacks = None
        trainer.feed.end()
        trainer.release()


def _bar(
    callbacks: keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None,
    trainer: DistributedTrainer,
    shown: bool,
) -> list[keras.callbacks.Callback]:
    """Return dtk's progress bar where Keras would add one and several replicas train."""
    given = keras.tree.flatten(callbacks) if callbacks else []
    if any(isinstance(one, keras.callbacks.ProgbarLogger) for one in given):
        return []
    several = trainer.strategy.num_replicas_in_sync > 1
    return [rank_callbacks.ProgressBar(trainer)] if shown and several else []


def data_of(asked: Mapping[str, object]) -> object:
    """Return the data that a call was given."""
    x = asked.get("x")
    others = [asked.get("y"), asked.get("sample_weight")]
    return x if all(other is None for other in others) else [x, *others]


def _evaluate_or_predict(
    method: Function[object], name: str, trainer: DistributedTrainer, args: Args, kwargs: Kwargs
) -> object:
    """Call `evaluate` or `predict` with the checks between ranks around it."""
    given = inspect.signature(method).bind(*args, **kwargs)
    asked, strategy = given.arguments, trainer.strategy
    if not strategy.is_chief:
        asked["verbose"] = 0
    if not isinstance(asked.get("callbacks"), keras.callbacks.CallbackList):
        asked["callbacks"] = on_this_rank(asked.get("callbacks"), strategy)
    trainer.synchronize_weights()
    # `fit` has compared the validation data, and compares the weights in every epoch.
    if trainer.callbacks is None:
        rank_checks.check_same_call(strategy, {"data": data_of(asked)})
        if trainer.model.built:
            shared_weights.agree_on_weights(trainer)
    try:
        with trainer.reading_of(name):
            result = method(*given.args, **given.kwargs)
        if trainer.callbacks is None:
            seeds.share_seeds(trainer)
        return result
    finally:
        if trainer.callbacks is None:
            trainer.release()
        else:
            trainer.resume()


def _on_batch(
    method: Function[object], name: str, trainer: DistributedTrainer, args: Args, kwargs: Kwargs
) -> object:
    """Take a single step: compare ranks before the first, and after steps 1, 2, 4, 8, ..."""
    trains = name == "train_on_batch"
    calls = trainer.calls[name] + 1
    looks = calls & (calls - 1) == 0
    if looks and trainer.takes_over:
        batch = [*args, *kwargs.values()]
        rank_checks.check_same_call(trainer.strategy, {f"batch of {name}": batch})
    if calls == 1 or not trains:
        trainer.synchronize_weights()
    if calls == 1 and trainer.model.built:
        shared_weights.agree_on_weights(trainer)
    try:
        result = method(*args, **kwargs)
    finally:
        if trainer.callbacks is None:
            trainer.release()
        else:
            trainer.resume()
    trainer.calls[name] = calls
    if looks and trainer.strategy.num_replicas_in_sync > 1 and not trainer.has_local_steps:
        shared_weights.check_same_weights(trainer, f"after call {calls} of {name}")
    return result


def on_this_rank(
    callbacks: keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None,
    strategy: Strategy,
) -> list[keras.callbacks.Callback]:
    """Select the callbacks of this rank: all on rank 0; elsewhere none that write or print."""
    flat = keras.tree.flatten(callbacks) if callbacks else []
    if strategy.is_chief:
        return flat
    silent = (*WRITERS, keras.callbacks.ProgbarLogger)
    return [callback for callback in flat if not isinstance(callback, silent)]


def join(
    callbacks: keras.callbacks.CallbackList,
    last: rank_callbacks.RankChecks,
    params: dict[str, object],
) -> None:
    """Add dtk's callbacks to a `CallbackList` that the script has built."""
    trainer = last.trainer
    ours = (rank_callbacks.RankChecks, rank_callbacks.SynchronizeWeights)
    mine = [c for c in callbacks.callbacks if not isinstance(c, ours)]
    first = rank_callbacks.SynchronizeWeights(trainer)
    for callback in (first, last):
        callback.set_model(trainer.model)
    callbacks.callbacks[:] = [first, *on_this_rank(mine, trainer.strategy), last]
    callbacks.set_params({**params, **(callbacks.params or {})})


def with_history(callbacks: list[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Add Keras's `History` where it is missing, so that it runs before `RankChecks`."""
    if any(isinstance(callback, keras.callbacks.History) for callback in callbacks):
        return callbacks
    return [*callbacks, keras.callbacks.History()]
