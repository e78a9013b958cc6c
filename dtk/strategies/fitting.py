"""What happens around `fit`, `evaluate` and `predict` on every rank. Public Keras names only.

What every rank is given is compared, the progress bar and callbacks that write files run on rank 0
only, and `agreement.Agreement` joins the callbacks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from dtk.errors import at_rank
from dtk.strategies import agreement, watching

# Keras's own callbacks that write files or talk to a server: once per job, not once per rank.
WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def wrap(model: Any, adoption: Any) -> None:
    """Put dtk's share of the work around the model's `fit`, `evaluate`, `predict` and the like."""
    wrapped_fit = watching.wrapped_fit if adoption.strategy.is_evaluator else _wrapped_fit
    model.fit = wrapped_fit(model.fit, model, adoption)
    for name in ("evaluate", "predict"):
        setattr(model, name, _wrapped_quiet(getattr(model, name), adoption))
    for name in ("train_on_batch", "test_on_batch", "predict_on_batch"):
        setattr(model, name, _wrapped_on_batch(getattr(model, name), adoption))


def _wrapped_fit(fit: Callable, model: Any, adoption: Any) -> Callable:
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def distributed_fit(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        asked, strategy = given.arguments, adoption.strategy
        check_batch_size(asked["batch_size"], strategy)
        if watching.leaves_validation(asked, strategy):
            asked["validation_data"] = None
        callbacks = asked["callbacks"]
        listed = isinstance(callbacks, keras.callbacks.CallbackList)
        every_batch = agreement.check_same_call(
            strategy,
            {"training data": asked["x"], "validation data": asked["validation_data"]},
            callbacks.callbacks if listed else keras.tree.flatten(callbacks or []),
        )
        adoption.meet()
        last = agreement.Agreement(adoption, every_batch)
        if listed:
            join(callbacks, last, {"epochs": asked["epochs"], "steps": None, "verbose": 0})
        else:
            asked["verbose"] = asked["verbose"] if strategy.is_chief else 0
            callbacks = keras.callbacks.CallbackList(
                [
                    agreement.Meeting(adoption),
                    *with_history(on_this_rank(callbacks, strategy)),
                    last,
                ],
                add_history=True,
                add_progbar=asked["verbose"] != 0,
                model=model,
                verbose=asked["verbose"],
                epochs=asked["epochs"],
                steps=None,
            )
        asked["callbacks"] = adoption.callbacks = callbacks
        try:
            return fit(*given.args, **given.kwargs)
        finally:
            agreement.tell(callbacks.callbacks, "on_fit_left")
            adoption.callbacks = None
            adoption.feed.end()
            adoption.leave()

    return distributed_fit


def _wrapped_quiet(method: Callable, adoption: Any) -> Callable:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        asked, strategy = given.arguments, adoption.strategy
        if not strategy.is_chief:
            asked["verbose"] = 0
        if not isinstance(asked.get("callbacks"), keras.callbacks.CallbackList):
            asked["callbacks"] = on_this_rank(asked.get("callbacks"), strategy)
        adoption.meet()
        # Inside `fit` the validation data has been compared, and the weights are every epoch.
        if adoption.callbacks is None:
            agreement.check_same_call(strategy, {"data": asked.get("x")})
            if adoption.model.built:
                agreement.agree_on_weights(adoption)
        try:
            return method(*given.args, **given.kwargs)
        finally:
            if adoption.callbacks is None:
                adoption.leave()
            else:
                adoption.go_back()

    return quiet


def _wrapped_on_batch(method: Callable, adoption: Any) -> Callable:
    """Steps without `fit`: agree before the first, and look again after 1, 2, 4, 8, ... of them."""
    calls, trains = 0, method.__name__ == "train_on_batch"

    @functools.wraps(method)
    def on_batch(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if calls == 0 or not trains:
            adoption.meet()
        if calls == 0 and adoption.model.built:
            agreement.agree_on_weights(adoption)
        try:
            result = method(*args, **kwargs)
        finally:
            if adoption.callbacks is None:
                adoption.leave()
            else:
                adoption.go_back()
        calls += 1
        if adoption.strategy.num_replicas_in_sync == 1 or adoption.trains_apart:
            return result
        if calls & (calls - 1) == 0:
            agreement.check_same_weights(adoption, f"after call {calls} of {method.__name__}")
        return result

    return on_batch


def check_batch_size(batch_size: int | None, strategy: Any) -> None:
    """Every worker must get at least one row of a full batch.

    Raises:
        ValueError: The global batch is smaller than the number of workers.
    """
    size = strategy.rows_needed
    if batch_size is not None and batch_size < size:
        raise ValueError(
            at_rank(
                strategy.rank,
                f"batch_size={batch_size} is smaller than {size} workers; use {size} or more "
                "(batch_size is the global batch)",
            )
        )


def on_this_rank(callbacks: Any, strategy: Any) -> list:
    """The callbacks that run on this rank: all on rank 0, none that write files elsewhere."""
    flat = keras.tree.flatten(callbacks) if callbacks else []
    if strategy.is_chief:
        return flat
    silent = (*WRITERS, keras.callbacks.ProgbarLogger)
    return [callback for callback in flat if not isinstance(callback, silent)]


def join(callbacks: Any, last: agreement.Agreement, params: dict) -> None:
    """Make a `CallbackList` that the script built itself do what `fit`'s own would."""
    adoption = last.adoption
    ours = (agreement.Agreement, agreement.Meeting)
    mine = [c for c in callbacks.callbacks if not isinstance(c, ours)]
    first = agreement.Meeting(adoption)
    for callback in (first, last):
        callback.set_model(adoption.model)
    callbacks.callbacks[:] = [first, *on_this_rank(mine, adoption.strategy), last]
    callbacks.set_params({**params, **(callbacks.params or {})})


def with_history(callbacks: list) -> list:
    """The callbacks with Keras's History among them, so that it comes before `Agreement`."""
    if any(isinstance(callback, keras.callbacks.History) for callback in callbacks):
        return callbacks
    return [*callbacks, keras.callbacks.History()]
