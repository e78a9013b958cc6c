"""Divide the layers of an existing model among ranks, by a plan of layer names."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from typing import TypeAlias

import keras

from dtk.communicators.base import Communicator
from dtk.compat.keras_variables import shard_of
from dtk.layers import channel_parallel, spatial
from dtk.layers.regions import model_group
from dtk.nests import Args, Config, Kwargs

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
        given: tuple[Args, Kwargs] = (args, kwargs)
        tensors = [t for t in keras.tree.flatten(given) if isinstance(t, keras.KerasTensor)]
        states = {self._state(tensor) for tensor in tensors}
        if how is None and len(states) == 1 and keeps_parts(layer):
            how = states.pop()
        if how is None:
            args, kwargs = keras.tree.map_structure(self._gathered, given)
            return layer(*args, **kwargs)
        args, kwargs = keras.tree.map_structure(lambda t: self._divided(t, how), given)
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
        found = [
            name
            for name, layer in known.items()
            if fnmatch.fnmatchcase(name, pattern) and not isinstance(layer, keras.layers.InputLayer)
        ]
        if not found:
            close = difflib.get_close_matches(pattern, known) or list(known)
            raise ValueError(
                f"plan[{pattern!r}]: model {model.name!r} has no such layer; did you mean "
                f"{', '.join(map(repr, close))}?"
            )
        for name in found:
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
    config: Config = layer.get_config()
    made = _KERAS.get(type(layer))
    if made is None:
        return type(layer).from_config(config)
    return made.from_config({k: v for k, v in config.items() if k not in _OWN})
