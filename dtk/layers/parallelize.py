"""Divide the layers of a model among ranks, by a plan of layer names; put its parts together."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.local import LocalCommunicator
from dtk.compat import keras_models, keras_optimizers
from dtk.compat.keras_variables import group_of, is_of_all, shard_of, whole_shape
from dtk.errors import at_rank
from dtk.layers import channel_parallel, spatial
from dtk.layers.pipeline import Pipeline
from dtk.layers.regions import model_group
from dtk.nests import Args, Config, Kwargs
from dtk.trainer.model_state import seed_states_of

BY_CHANNELS = {
    keras.layers.Dense: channel_parallel.ChannelParallelDense,
    keras.layers.Conv1D: channel_parallel.ChannelParallelConv1D,
    keras.layers.Conv2D: channel_parallel.ChannelParallelConv2D,
    keras.layers.Conv3D: channel_parallel.ChannelParallelConv3D,
}
BY_IMAGE = {
    keras.layers.Conv2D: spatial.SpatiallyParallelConv2D,
    keras.layers.MaxPooling2D: spatial.SpatiallyParallelMaxPooling2D,
    keras.layers.AveragePooling2D: spatial.SpatiallyParallelAveragePooling2D,
    keras.layers.UpSampling2D: spatial.SpatiallyParallelUpSampling2D,
    keras.layers.BatchNormalization: spatial.SpatiallyParallelBatchNormalization,
}
# Layers that compute each element from that element alone: they stay between the borders.
ELEMENTWISE = (
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
    keras.layers.Add,
    keras.layers.Subtract,
    keras.layers.Multiply,
    keras.layers.Average,
    keras.layers.Maximum,
    keras.layers.Minimum,
)
_BORDERS = {
    "rows": (spatial.SplitRows, spatial.GatherRows),
    "columns": (spatial.SplitColumns, spatial.GatherColumns),
}
_KERAS = {made: layer for layer, made in (*BY_CHANNELS.items(), *BY_IMAGE.items())}
_KERAS[channel_parallel.NodeParallelDense] = keras.layers.Dense
# Arguments of a layer in parts that the Keras layer does not have.
_OWN = ("split", "gather_output", "input_is_split")
_SPLITS = {"channels": "output", "output": "output", "input": "input"}

Plan: TypeAlias = Mapping[str, str]


def parallelize(
    model: keras.Model, plan: Plan, communicator: Communicator | None = None
) -> keras.Model:
    """Return a model that computes the same, with some layers divided among the ranks of a group.

    Layers of `dtk.layers`, with this rank's part of the weights, replace the layers of the plan.
    `SplitRows` and `GatherRows` (or `SplitColumns` and `GatherColumns`) stand at the borders of
    layers that divide rows (or columns); layers in between that work on each element stay there.
    All other layers are the same objects as before.

    Args:
        model: A built functional or Sequential model. It is not changed, but shares the undivided
            layers.
        plan: Maps the name of a layer, or a pattern of `fnmatch`, to "channels" or "output" (each
            rank has some of the filters), "input" (some of the input channels), "rows" or "columns"
            (part of the image). Every rank gives the same plan.
        communicator: Communicator of the ranks that share the model; `model_communicator` of the
            current strategy when None.

    Returns:
        A functional model, compiled like `model`.

    Raises:
        ValueError: No layer matches a name, two patterns divide a layer differently, or a layer
            cannot be divided like this.
        TypeError: The plan is not a mapping.

    Example:
        >>> import dtk, keras
        >>> model = keras.Sequential([
        ...     keras.Input((32, 32, 3)),
        ...     keras.layers.Conv2D(8, 3, activation="relu", name="conv"),
        ...     keras.layers.Flatten(),
        ...     keras.layers.Dense(10, name="head"),
        ... ])
        >>> parallel = dtk.layers.parallelize(model, {"conv": "rows", "head": "channels"})
        >>> [layer.name for layer in parallel.layers][1:-1]
        ['split_rows', 'conv', 'gather_rows', 'flatten']
    """
    if not (isinstance(model, keras.Sequential) or hasattr(model, "operations")) or not model.built:
        raise ValueError(
            f"parallelize got {type(model).__name__} {model.name!r}; it takes a functional or "
            "Sequential model that is built; use the layers of dtk.layers in a subclassed one"
        )
    return _Rewriting(model, plan, model_group(communicator)).result()


class _Rewriting:
    """One call of `parallelize`."""

    def __init__(self, model: keras.Model, plan: Plan, group: Communicator) -> None:
        self._model = model
        self._group = group
        self._how = _planned(model, plan)
        self._replaced: list[tuple[keras.Layer, keras.Layer]] = []
        self._spatial: dict[int, str] = {}  # layer -> "rows" or "columns"
        self._parts: dict[int, tuple[keras.KerasTensor, str]] = {}  # tensor -> how it is divided

    def result(self) -> keras.Model:
        model = self._model
        if isinstance(model, keras.Sequential):
            model = keras.Model(model.inputs[0], model.outputs[0], name=model.name)
        cloned = keras.models.clone_model(
            model, clone_function=self._layer, call_function=self._call
        )
        outputs = keras.tree.map_structure(self._gathered, cloned.output)
        result = keras.Model(cloned.input, outputs, name=model.name)
        for old, new in self._replaced:
            for before, now in zip(old.weights, new.weights, strict=True):
                shard = shard_of(now)
                now.assign(before.value if shard is None else shard.part(before.value))
        if self._model.compiled:
            result.compile_from_config(self._model.get_compile_config())
        return result

    def _layer(self, layer: keras.Layer) -> keras.Layer:
        how = self._how.get(layer.name)
        if how is None or isinstance(layer, ELEMENTWISE):
            return layer
        config: Config = {**layer.get_config(), "communicator": self._group}
        if how in _SPLITS:
            new = BY_CHANNELS[type(layer)].from_config({**config, "split": _SPLITS[how]})
        else:
            new = BY_IMAGE[type(layer)].from_config({**config, "split": how})
            self._spatial[id(new)] = how
        self._replaced.append((layer, new))
        return new

    def _call(self, layer: keras.Layer, *args: object, **kwargs: object) -> object:
        how = self._spatial.get(id(layer))
        arguments: tuple[Args, Kwargs] = (args, kwargs)
        tensors = [t for t in keras.tree.flatten(arguments) if isinstance(t, keras.KerasTensor)]
        states = {self._state(tensor) for tensor in tensors}
        if how is None and len(states) == 1 and keeps_parts(layer):
            how = states.pop()
        if how is None:
            args, kwargs = keras.tree.map_structure(self._gathered, arguments)
            return layer(*args, **kwargs)
        args, kwargs = keras.tree.map_structure(lambda t: self._divided(t, how), arguments)
        outputs = layer(*args, **kwargs)
        for tensor in keras.tree.flatten(outputs):
            self._parts[id(tensor)] = tensor, how
        return outputs

    def _state(self, tensor: keras.KerasTensor) -> str | None:
        return self._parts[id(tensor)][1] if id(tensor) in self._parts else None

    def _gathered(self, tensor: keras.KerasTensor) -> keras.KerasTensor:
        state = self._state(tensor)
        return tensor if state is None else _BORDERS[state][1](self._group)(tensor)

    def _divided(self, tensor: keras.KerasTensor, how: str) -> keras.KerasTensor:
        if not isinstance(tensor, keras.KerasTensor) or self._state(tensor) == how:
            return tensor
        return _BORDERS[how][0](self._group)(self._gathered(tensor))


def keeps_parts(layer: keras.Layer) -> bool:
    if isinstance(layer, keras.layers.Activation):
        return channel_parallel.is_elementwise(layer.activation)
    return isinstance(layer, ELEMENTWISE)


def _planned(model: keras.Model, plan: Plan) -> dict[str, str]:
    """Return how to divide each layer of the plan, by its name."""
    if not isinstance(plan, Mapping):
        raise TypeError(
            f"plan={plan!r}; expected a dict of names of layers and how each is divided, such as "
            "{'head': 'output'}"
        )
    known = {layer.name: layer for layer in model.layers}
    planned: dict[str, str] = {}
    for pattern, how in plan.items():
        if how not in {*_SPLITS, *_BORDERS}:
            raise ValueError(
                f"plan[{pattern!r}] = {how!r}; use 'channels', 'output', 'input', 'rows' or "
                "'columns'"
            )
        names = [
            name
            for name, layer in known.items()
            if fnmatch.fnmatchcase(name, pattern) and not isinstance(layer, keras.layers.InputLayer)
        ]
        if not names:
            close = difflib.get_close_matches(pattern, known) or list(known)
            raise ValueError(
                f"plan[{pattern!r}]: model {model.name!r} has no such layer; did you mean "
                f"{', '.join(map(repr, close))}?"
            )
        for name in names:
            if planned.setdefault(name, how) != how:
                raise ValueError(
                    f"layer {name!r} is to be divided by {planned[name]!r} and, as of "
                    f"plan[{pattern!r}], by {how!r}; let one pattern fit it"
                )
            _check_kind(known[name], how)
    return planned


def _check_kind(layer: keras.Layer, how: str) -> None:
    kinds = BY_CHANNELS if how in _SPLITS else BY_IMAGE
    if type(layer) in kinds or (how in _BORDERS and keeps_parts(layer)):
        return
    names = ", ".join(kind.__name__ for kind in kinds)
    raise ValueError(
        f"layer {layer.name!r} is a {type(layer).__name__}, which cannot be divided by {how!r}; "
        f"it takes {names}; leave it out of the plan"
    )


def is_in_parts(layer: keras.Layer) -> bool:
    """Return whether a layer computes a part only."""
    return isinstance(layer, spatial.Border) or type(layer) in _KERAS


def plain_layer(layer: keras.Layer) -> keras.Layer:
    """Make the layer of one device for a layer in parts."""
    if isinstance(layer, spatial.Border):
        return keras.layers.Identity(name=layer.name)
    config, made = layer.get_config(), _KERAS.get(type(layer))
    if made is None:
        return type(layer).from_config(config)
    return made.from_config({k: v for k, v in config.items() if k not in _OWN})


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
    trainable: bool  # now; a script may freeze a layer once there is a pipeline


class ModelInParts:
    """The variables of one model that the ranks of a group hold in parts."""

    def __init__(self, model: keras.Model, group: Communicator):
        self._model, self._group = model, group
        self._mine = _keyed(model)
        self.whole: keras.Model | None = None
        self._of_whole: Mapping[str, keras.Variable] = {}
        described = [
            Entry(key, whole_shape(variable), variable.dtype, group.rank, variable.trainable)
            for key, variable in self._mine.items()
        ]
        entries: dict[str, Entry] = {}
        for entry in itertools.chain(*group.allgather_object(described)):
            entries.setdefault(entry.key, entry)
        self._entries = list(entries.values())

    def build(self) -> keras.Model:
        """Build the model of one device, with the optimizer of the model."""
        with _as_if_nothing_was_drawn():
            if isinstance(self._model, Pipeline):
                self.whole = Pipeline.from_config(self._model.get_config(), LocalCommunicator())
            else:
                self.whole = keras.models.clone_model(self._model, clone_function=plain_layer)
            trainable = {entry.key: entry.trainable for entry in self._entries}
            for key, variable in _keyed(self.whole).items():
                variable.trainable = trainable.get(key, variable.trainable)
            optimizer = getattr(self._model, "optimizer", None)
            if optimizer is not None:
                made = optimizer.from_config(optimizer.get_config())
                made.build(self.whole.trainable_variables)
                numbers = keras_optimizers.saved_numbers(optimizer).numbers
                keras_optimizers.saved_numbers(made).numbers = numbers
                self.whole.optimizer = made
        self._of_whole = _keyed(self.whole)
        expected = {entry.key: entry.shape for entry in self._entries}
        built = {key: tuple(v.shape) for key, v in self._of_whole.items()}
        if built != expected:
            key = next(k for k in {**expected, **built} if built.get(k) != expected.get(k))
            message = (
                f"model {self._model.name!r} cannot be put together from its configuration: "
                f"variable {key} has shape {expected.get(key)} in the parts and {built.get(key)} "
                "in the whole; use functional or Sequential models rewritten by "
                "dtk.layers.parallelize, or dtk.layers.Pipeline"
            )
            raise ValueError(at_rank(self._group.rank, message))
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
            source = self._of_whole.get(entry.key) if world.rank == 0 else None
            value = world.broadcast(_value_or_room(source, entry), root=0)
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
    variables = {
        f"stage {number} variable {index}": variable
        for number, stage in stages.items()
        for index, variable in enumerate([*stage.weights, *seed_states_of(stage)])
    }
    names = {id(variable): key for key, variable in variables.items()}
    outer = getattr(model, "optimizer", None)
    for depth, optimizer in enumerate(keras_optimizers.chain(outer) if outer else ()):
        about = {
            id(slot): (f"{names[id(variable)]} {slot.name.removeprefix(start)}", slot)
            for slot, variable, start in keras_optimizers.slots_by_variable(optimizer)
        }
        plain = [v for v in keras_optimizers.own_variables(optimizer) if id(v) not in about]
        variables |= {f"optimizer {depth} variable {i}": v for i, v in enumerate(plain)}
        variables |= {f"optimizer {depth} {key}": slot for key, slot in about.values()}
    return variables


@contextlib.contextmanager
def _as_if_nothing_was_drawn() -> Iterator[None]:
    """Restore the generators from which Keras draws seeds, since other ranks draw nothing."""
    before, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(of_numpy)
