"""Put a model in parts together on one rank, and divide it again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.local import LocalCommunicator
from dtk.compat import keras_models, keras_optimizers
from dtk.compat.keras_variables import group_of, is_of_all, shard_of, whole_shape
from dtk.errors import at_rank
from dtk.layers.parallelize import is_in_parts, plain_layer
from dtk.layers.pipeline import Pipeline
from dtk.trainer.model_state import seed_states_of


def whole(model: keras.Model) -> keras.Model:
    """Return the model of one device for a model that the ranks of a group hold in parts.

    Every rank of the group calls `whole`. The result has the weights and the optimizer of the
    model, but shares nothing with it. One process can save, export or train it.

    Args:
        model: The model with this rank's parts.

    Returns:
        The whole model, on every rank; `model` itself if it is not in parts.

    Raises:
        ValueError: The model cannot be built again from its configuration.

    Example:
        >>> import keras
        >>> from dtk.layers import whole
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> whole(model) is model
        True
    """
    groups = (group_of(variable) for variable in model.weights)
    group = next((one for one in groups if one is not None), None)
    if group is None:
        if not any(map(is_in_parts, keras_models.layers_of(model))):
            return model
        group = LocalCommunicator()  # this process has all weights: there is nothing to gather
    parts = ModelInParts(model, group)
    parts.build()
    parts.gather()
    assert parts.whole is not None
    return parts.whole


class Entry(NamedTuple):
    """A variable of the whole model."""

    key: str  # equal on all ranks
    shape: tuple[int, ...]  # shape of the whole variable
    dtype: str
    owner: int  # the lowest rank of the group that holds it


class ModelInParts:
    """The variables of one model that the ranks of a group hold in parts."""

    def __init__(self, model: keras.Model, group: Communicator):
        self._model, self._group = model, group
        self._mine = _keyed(model)
        self.whole: keras.Model | None = None
        self._of_whole: Mapping[str, keras.Variable] = {}
        described = [
            Entry(key, whole_shape(variable), variable.dtype, group.rank)
            for key, variable in self._mine.items()
        ]
        found: dict[str, Entry] = {}
        for entries in group.allgather_object(described):
            for entry in entries:
                found.setdefault(entry.key, entry)
        self._entries = list(found.values())

    def build(self) -> keras.Model:
        """Build the model of one device, with the optimizer of the model."""
        with _as_if_nothing_was_drawn():
            if isinstance(self._model, Pipeline):
                self.whole = self._model.on_one_rank()
            else:
                self.whole = keras.models.clone_model(self._model, clone_function=plain_layer)
            optimizer = getattr(self._model, "optimizer", None)
            if optimizer is not None:
                made = type(optimizer).from_config(optimizer.get_config())
                made.build(self.whole.trainable_variables)
                self.whole.optimizer = made
        self._of_whole = _keyed(self.whole)
        expected = {entry.key: entry.shape for entry in self._entries}
        built = {key: tuple(v.shape) for key, v in self._of_whole.items()}
        if built != expected:
            key = next(k for k in {**expected, **built} if built.get(k) != expected.get(k))
            told = (
                f"model {self._model.name!r} cannot be put together from its configuration: "
                f"variable {key} has shape {expected.get(key)} in the parts and {built.get(key)} "
                "in the whole; use functional or Sequential models rewritten by "
                "dtk.layers.parallelize, or dtk.layers.Pipeline"
            )
            raise ValueError(at_rank(self._group.rank, told))
        return self.whole

    def gather(self) -> None:
        """Give the whole model the values of all parts, on the ranks that have built it.

        Every rank of the group calls this. One variable is sent at a time.
        """
        for entry in self._entries:
            value = self._value(entry)
            if self.whole is not None:
                self._of_whole[entry.key].assign(value)

    def _value(self, entry: Entry) -> tf.Tensor:
        variable = self._mine.get(entry.key)
        value = _value_or_room(variable, entry)
        shard = None if variable is None else shard_of(variable)
        if shard is not None:
            return shard.whole(value)
        if variable is not None and is_of_all(variable):
            return value
        return self._group.broadcast(value, entry.owner)

    def scatter(self, world: Communicator) -> None:
        """Give all parts the values of the whole model, which rank 0 of the world has built.

        Every rank of the world calls this. One variable is sent at a time.
        """
        for entry in self._entries:
            given = self._of_whole.get(entry.key) if world.rank == 0 else None
            value = world.broadcast(_value_or_room(given, entry), root=0)
            if (variable := self._mine.get(entry.key)) is not None:
                shard = shard_of(variable)
                variable.assign(value if shard is None else shard.part(value))


def _value_or_room(variable: keras.Variable | None, entry: Entry) -> tf.Tensor:
    """Return a variable's value, or zeros where another rank has it."""
    if variable is None:
        return tf.zeros(entry.shape, entry.dtype)
    return keras.ops.convert_to_tensor(variable)


def _keyed(model: keras.Model) -> dict[str, keras.Variable]:
    """Return a model's weights, seeds and optimizer state by keys that are equal on all ranks."""
    stages = model.stages if isinstance(model, Pipeline) else {0: model}
    found = {
        f"stage {number} variable {index}": variable
        for number, stage in stages.items()
        for index, variable in enumerate([*stage.weights, *seed_states_of(stage)])
    }
    names = {id(variable): key for key, variable in found.items()}
    outer = getattr(model, "optimizer", None)
    for depth, optimizer in enumerate(keras_optimizers.chain(outer) if outer else ()):
        about = {
            id(slot): (f"{names[id(variable)]} {slot.name.removeprefix(start)}", slot)
            for slot, variable, start in keras_optimizers.slots_by_variable(optimizer)
        }
        plain = [v for v in keras_optimizers.own_variables(optimizer) if id(v) not in about]
        found |= {f"optimizer {depth} variable {i}": v for i, v in enumerate(plain)}
        found |= {f"optimizer {depth} {key}": slot for key, slot in about.values()}
    return found


@contextlib.contextmanager
def _as_if_nothing_was_drawn() -> Iterator[None]:
    """Restore the generators from which Keras draws seeds, since other ranks draw nothing."""
    before, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(of_numpy)
