"""What happens around `fit`, `evaluate` and `predict` on every rank. Public Keras names only.

What every rank is given is compared, the progress bar and callbacks that write files run on rank 0
only, and `agreement.Agreement` joins the callbacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras

from dtk.strategies import agreement, watching

# Keras's own callbacks that write files or talk to a server: once per job, not once per rank.
WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def call(adoption: Any, name: str, method: Callable, args: tuple, kwargs: dict) -> Any:
    """Call one of Keras's own methods with dtk's share of the work around it.

    Args:
        adoption: The model's.
        name: The method's, such as "fit".
        method: Keras's own, bound to the model.
        args: What it was called with.
        kwargs: The same.
    """
    if name == "fit":
        if adoption.strategy.is_evaluator:
            return watching.fit(method, adoption, args, kwargs)
        return _fit(method, adoption, args, kwargs)
    if name in ("evaluate", "predict"):
        return _look(method, name, adoption, args, kwargs)
    if name == "predict_on_batch" and adoption.takes_over:
        method = adoption.predict_on_batch
    return _on_batch(method, name, adoption, args, kwargs)


def _fit(fit: Callable, adoption: Any, args: tuple, kwargs: dict) -> Any:
    given = inspect.signature(fit).bind(*args, **kwargs)
    given.apply_defaults()
    asked, strategy = given.arguments, adoption.strategy
    if watching.leaves_validation(asked, strategy):
        asked["validation_data"] = None
    callbacks = asked["callbacks"]
    listed = isinstance(callbacks, keras.callbacks.CallbackList)
    every_batch = agreement.check_same_call(
        strategy,
        {"training data": data_of(asked), "validation data": asked["validation_data"]},
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
            model=adoption.model,
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


def data_of(asked: Mapping[str, Any]) -> Any:
    """What a call was given to read: `x`, and what belongs to it."""
    x = asked.get("x")
    others = [asked.get("y"), asked.get("sample_weight")]
    return x if all(other is None for other in others) else [x, *others]


def _look(method: Callable, name: str, adoption: Any, args: tuple, kwargs: dict) -> Any:
    """`evaluate` or `predict`."""
    given = inspect.signature(method).bind(*args, **kwargs)
    asked, strategy = given.arguments, adoption.strategy
    if not strategy.is_chief:
        asked["verbose"] = 0
    if not isinstance(asked.get("callbacks"), keras.callbacks.CallbackList):
        asked["callbacks"] = on_this_rank(asked.get("callbacks"), strategy)
    adoption.meet()
    # Inside `fit` the validation data has been compared, and the weights are every epoch.
    if adoption.callbacks is None:
        agreement.check_same_call(strategy, {"data": data_of(asked)})
        if adoption.model.built:
            agreement.agree_on_weights(adoption)
    try:
        with adoption.reading_of(name):
            return method(*given.args, **given.kwargs)
    finally:
        if adoption.callbacks is None:
            adoption.leave()
        else:
            adoption.go_back()


def _on_batch(method: Callable, name: str, adoption: Any, args: tuple, kwargs: dict) -> Any:
    """Steps without `fit`: agree before the first, and look again after 1, 2, 4, 8, ... of them."""
    trains = name == "train_on_batch"
    calls = adoption.calls[name] + 1
    looks = calls & (calls - 1) == 0
    if looks and adoption.takes_over:
        batch = [*args, *kwargs.values()]
        agreement.check_same_call(adoption.strategy, {f"batch of {name}": batch})
    if calls == 1 or not trains:
        adoption.meet()
    if calls == 1 and adoption.model.built:
        agreement.agree_on_weights(adoption)
    try:
        result = method(*args, **kwargs)
    finally:
        if adoption.callbacks is None:
            adoption.leave()
        else:
            adoption.go_back()
    adoption.calls[name] = calls
    if looks and adoption.strategy.num_replicas_in_sync > 1 and not adoption.trains_apart:
        agreement.check_same_weights(adoption, f"after call {calls} of {name}")
    return result


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
