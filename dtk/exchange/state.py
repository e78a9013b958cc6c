"""An exchange's state between steps: variables that checkpoints keep.

The kind of a variable decides what a checkpoint holds, and how another number of ranks restores it:

    same      equal on all ranks
    sum       differs by rank; their sum counts (residuals, gradients not sent yet)
    mean      differs by rank; another number of ranks starts from their mean (local momentum)
    stripe    each rank has some rows of one whole, in rank order
"""

from __future__ import annotations

import concurrent.futures
import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict, TypeVar

import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.nests import Array

_T = TypeVar("_T")
KINDS = ("same", "sum", "mean", "stripe")


class StateVariable(NamedTuple):
    """A variable, and how checkpoints keep it."""

    variable: tf.Variable
    kind: str
    # the first row of a stripe, and the one after its last; None for other kinds
    rows: tuple[int, int] | None


class SavedItem(TypedDict):
    """A checkpoint's entry for a variable."""

    kind: str
    value: Array  # the values of all ranks along the first axis, unless the kind is "same"


class ExchangeState:
    """Named variables, made when a traced step first asks for them.

    Example:
        >>> from dtk.communicators.local import LocalCommunicator
        >>> state = ExchangeState(LocalCommunicator(), "CPU:0")
        >>> state.variable("residual", "sum", (2,)).assign_add([1.0, 2.0]).numpy().tolist()
        [1.0, 2.0]
        >>> state.variable("residual", "sum", (2,)).numpy().tolist()
        [1.0, 2.0]
    """

    def __init__(self, communicator: Communicator, device: str):
        self._communicator = communicator
        self._device = device
        self.prefix = ""
        self._kept: dict[str, StateVariable] = {}
        self._scratch: dict[str, tf.Variable] = {}
        self._restored: dict[str, SavedItem] = {}

    @property
    def variables(self) -> list[tf.Variable]:
        """Every variable made or kept so far."""
        return [*(kept.variable for kept in self._kept.values()), *self._scratch.values()]

    def part(self, prefix: str) -> ExchangeState:
        """Return this state with a prefix before every name."""
        part = copy.copy(self)
        part.prefix = self.prefix + prefix
        return part

    def variable(
        self,
        name: str,
        kind: str,
        shape: Sequence[int],
        dtype: tf.DType = tf.float32,
        rows: tuple[int, int] | None = None,
    ) -> tf.Variable:
        """Return the variable of this name; a new one holds zeros, or a checkpoint's values."""
        if self.prefix + name not in self._kept:
            self._keep(StateVariable(self._make(name, shape, dtype), kind, rows), name)
        return self._kept[self.prefix + name].variable

    def keep(self, name: str, kind: str, variable: tf.Variable) -> None:
        """Also save and restore a variable that was made elsewhere."""
        self._keep(StateVariable(variable, kind, None), name)

    def scratch(self, name: str, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        """Return the variable of this name, which no checkpoint needs."""
        if self.prefix + name not in self._scratch:
            self._scratch[self.prefix + name] = self._make(name, shape, dtype)
        return self._scratch[self.prefix + name]

    def _keep(self, kept: StateVariable, name: str) -> None:
        self._kept[self.prefix + name] = kept
        saved = self._restored.pop(self.prefix + name, None)
        if saved is not None:
            _outside(lambda: self._assign(self.prefix + name, kept, saved))

    def _make(self, name: str, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        def make() -> tf.Variable:
            with tf.device(self._device):
                return tf.Variable(tf.zeros(shape, dtype), trainable=False, name=name)

        return _outside(make)

    def collect(self, root: int | None = None) -> dict[str, SavedItem]:
        """Return the saved variables of all ranks; all ranks call it together."""
        saved = dict(self._restored)  # restored values that no step has asked for yet
        for name, kept in self._kept.items():
            value = tf.convert_to_tensor(kept.variable)
            if kept.kind in ("sum", "mean"):
                value = self._communicator.allgather(value[None])
            elif kept.kind == "stripe":
                value = self._communicator.allgather(value)
            # Checkpoint files have no bfloat16.
            value = tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value
            if root in (None, self._communicator.rank):
                saved[name] = {"kind": kept.kind, "value": value.numpy()}
        return saved

    def restore(self, saved: dict[str, SavedItem]) -> None:
        """Restore the result of `collect`, with any number of ranks.

        Variables that no step has asked for yet get their values when a step does.
        """
        self._restored.clear()
        for name, item in saved.items():
            if name in self._kept:
                self._assign(name, self._kept[name], item)
            else:
                self._restored[name] = item

    def _assign(self, name: str, kept: StateVariable, saved: SavedItem) -> None:
        rank, size = self._communicator.rank, self._communicator.size
        value = np.asarray(saved["value"])
        if kept.kind == "stripe":
            value = value[slice(*kept.rows)] if kept.rows else value
        elif kept.kind != "same":
            value = value[rank] if len(value) == size else _shared_out(value, kept.kind, size)
        if value.shape != tuple(kept.variable.shape):
            raise ValueError(
                f"the checkpoint remembers {name} of shape {value.shape} for the exchange, but "
                f"here it has shape {tuple(kept.variable.shape)}; resume with the exchange that "
                "was saved, or use resume=False and model.load_weights"
            )
        kept.variable.assign(tf.cast(value, kept.variable.dtype))


def _shared_out(values: Array, kind: str, size: int) -> Array:
    """Return each rank's value in a world of another size, from the values of all ranks."""
    mean = values.mean(0, dtype=np.float64)
    mean = mean if kind == "mean" else mean * (len(values) / size)
    return mean.astype(values.dtype)


def _outside(work: Callable[[], _T]) -> _T:
    """Run in a new thread, which is outside the traced graph, its device and its replica."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()
