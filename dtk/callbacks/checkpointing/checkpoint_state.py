"""State beside the weights, as JSON and arrays: of other callbacks and of random generators."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import NotRequired, TypeAlias, TypedDict, cast

import keras
import numpy as np
import tensorflow as tf

from dtk.compat.keras_data import FeedPosition
from dtk.exchange.contract import SavedItem
from dtk.nests import Array, Logs

# What Keras's own callbacks learn while training. Everything else about them is in the script.
# Names with an underscore are Keras's own, tested in tests/callbacks/test_checkpoint.py.
KNOWN: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        keras.callbacks.EarlyStopping,
        ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    ),
    (keras.callbacks.ReduceLROnPlateau, ("wait", "cooldown_counter", "best")),
    (
        keras.callbacks.ModelCheckpoint,
        ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    ),
    (keras.callbacks.TensorBoard, ("_global_train_batch", "_global_test_batch")),
    (keras.callbacks.History, ("history", "epoch")),
    # Which weights are in the model.
    (keras.callbacks.SwapEMAWeights, ("_ema_weights_in_model",)),
)

# Raised when what is written cannot be read by an older dtk.
FORMAT = 1

_ANOTHER_LIBRARY_S = 2  # `numpy.dtype.isbuiltin` of a type that another library has added

_PAIRS = "(key, value)"
# Dicts with this key alone stand for an array, and for a dict with other keys than strings.
_MARKED = ({"array"}, {_PAIRS})

# What goes to JSON, and the path, the shape and the dtype of each variable there.
Packed: TypeAlias = "bool | int | float | str | list[Packed] | dict[str, Packed] | None"
Described: TypeAlias = list[tuple[str, list[int], str]]
# What callbacks have learned, by class and position.
Learned: TypeAlias = "dict[str, dict[str, object]]"


class Generators(TypedDict):
    """State of the global random number generators."""

    # version, numbers and the next normal number of Python's
    python: tuple[int, Sequence[int], float | None]
    numpy: dict[str, object]  # state of NumPy's, by name


class CheckpointState(TypedDict):
    """What a checkpoint holds beside the weights; on disk, names stand in the places of arrays."""

    format: int  # number of the format
    workers: int  # ranks of the world that has written it
    iterations: NotRequired[int | None]  # steps of the optimizer; None without one
    variables: Described  # of the model and its optimizer, as `describe` says them
    best: float | None  # best value of the monitored number; None before the first
    note: NotRequired[Mapping[str, object] | None]  # of `best.json`, if this is the best so far
    stopped: bool  # whether a callback has stopped training
    seeds: list[Array]  # state of the model's random number generators
    callbacks: Learned
    random: Generators  # state of the global random number generators
    tensorflow_seed: int | None  # tensorFlow's global seed; None when none was set
    # what the rows of arrays are shuffled from; None where Keras draws their order
    shuffle_seed: int | None
    data: FeedPosition
    epoch: int  # epochs done
    step: int  # steps done of the epoch that goes on
    lora: NotRequired[list[Array]]  # weights of layers with LoRA, which Keras's file adds up
    metrics: list[Array] | None  # state of metrics in the middle of an epoch; else None
    trained: Logs | None  # numbers of an epoch of which only the validation is left; else None
    exchange: NotRequired[dict[str, SavedItem]]  # state of the exchange of gradients, by name


def check(state: CheckpointState) -> None:
    """Refuse numbers that no dtk has written, whatever the digest says."""
    counts = {name: state.get(name) for name in ("format", "workers", "epoch", "step")}
    counts["data.seen"] = state.get("data", {}).get("seen")
    for name, value in counts.items():
        least = 1 if name in ("format", "workers") else 0
        # By its very type: True is an `int` to Python, and no epoch.
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r:.60}, expected a number of at least {least}")


def pack(value: object, arrays: dict[str, Array], where: str = "state") -> Packed:
    """Turn a value into JSON, moving its arrays to `arrays`; messages call it `where`.

    Example:
        >>> import numpy as np
        >>> arrays = {}
        >>> pack({"best": np.float32(0.5), "weights": [np.zeros(2)]}, arrays)
        {'best': 0.5, 'weights': [{'array': 'a0'}]}
        >>> unpack({'array': 'a0'}, arrays)
        array([0., 0.])
        >>> pack({0: 1.5}, arrays)
        {'(key, value)': [[0, 1.5]]}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        if set(value) not in _MARKED and all(isinstance(key, str) for key in value):
            return {key: pack(one, arrays, f"{where}[{key!r}]") for key, one in value.items()}
        # JSON has no other keys, and dicts with the names of these marks stand for something else.
        return {_PAIRS: pack(list(value.items()), arrays, where)}
    if isinstance(value, list | tuple):
        return [pack(item, arrays, where) for item in value]
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return pack(value.item(), arrays, where)
    kind = f"a {type(value).__name__}"
    if isinstance(value, np.ndarray) or keras.ops.is_tensor(value):
        array = value if isinstance(value, np.ndarray) else cast("tf.Tensor", value).numpy()
        kind = f"an array of {array.dtype}"
        if not array.dtype.hasobject:  # which a file would hold, and nobody read
            # Of bfloat16 and the like, which are not numpy's own, a file of arrays holds the bytes.
            dtype = f":{array.dtype.name}" if array.dtype.isbuiltin == _ANOTHER_LIBRARY_S else ""
            name = f"a{len(arrays)}{dtype}"
            arrays[name] = array
            return {"array": name}
    raise TypeError(
        f"cannot save {where}, {kind}; use numbers, strings, arrays of numbers, lists and dicts of "
        "these"
    )


def unpack(value: object, arrays: Mapping[str, Array]) -> object:
    """Undo `pack`; tuples come back as lists, but those that are keys."""
    if isinstance(value, list):
        return [unpack(item, arrays) for item in value]
    if isinstance(value, dict):
        if set(value) == {"array"}:
            array, dtype = arrays[value["array"]], value["array"].partition(":")[2]
            return array.view(dtype) if dtype else array
        if set(value) == {_PAIRS}:
            return {_key(key): unpack(item, arrays) for key, item in value[_PAIRS]}
        return {key: unpack(item, arrays) for key, item in value.items()}
    return value


def _key(value: object) -> object:
    return tuple(map(_key, value)) if isinstance(value, list) else value


def of_callbacks(callbacks: Iterable[keras.callbacks.Callback]) -> Learned:
    """Return what every callback has learned: its `get_state()`, or the attributes in `KNOWN`."""
    states = {}
    for name, callback in _named(callbacks):
        known = next((names for kind, names in KNOWN if isinstance(callback, kind)), ())
        if _learns(callback):
            states[name] = callback.get_state()
        elif known:
            states[name] = {attribute: getattr(callback, attribute, None) for attribute in known}
    return states


def copies_of_callbacks(callbacks: Iterable[keras.callbacks.Callback]) -> Learned:
    """Return what every `get_state()` returns, which later changes of the callback leave alone."""
    own, arrays = [one for one in callbacks if _learns(one)], dict[str, Array]()
    packed = pack(of_callbacks(own), arrays)
    copies = {name: np.array(array) for name, array in arrays.items()}
    return cast(Learned, unpack(packed, copies))


def to_callbacks(states: Learned, callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Give callbacks what `of_callbacks` returned; those that are not here any more are skipped."""
    for name, callback in _named(callbacks):
        if name not in states:
            continue
        if _learns(callback):
            callback.set_state(states[name])
        else:
            for attribute, value in states[name].items():
                setattr(callback, attribute, value)


def _learns(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback saves and takes what it learns; `get_state` alone may mean else."""
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _named(
    callbacks: Iterable[keras.callbacks.Callback],
) -> Iterable[tuple[str, keras.callbacks.Callback]]:
    seen: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        kind = type(callback).__name__
        yield f"{kind}.{seen[kind]}", callback
        seen[kind] += 1


def of_generators() -> Generators:
    """Return the state of Python's and numpy's global random number generators."""
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}


def to_generators(state: Generators) -> None:
    """Restore what `of_generators` returned."""
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
    np.random.set_state(state["numpy"])
