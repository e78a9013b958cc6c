"""Operators read from a Keras model: shapes, weights, operations and possible divisions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import keras

from dtk.layers.channel_parallel import is_elementwise
from dtk.layers.parallelize import ELEMENTWISE
from dtk.planning.model.operators import SPATIAL, Operator, Shape, Split
from dtk.planning.quantity import PlanError

_CONVOLUTIONS = ("Conv1D", "Conv2D", "Conv3D")
_CHANNELS = ("Dense", *_CONVOLUTIONS)
_WINDOWS = ("Conv2D", "MaxPooling2D", "AveragePooling2D")
# What `dtk.layers.parallelize` divides by rows, besides what works on each element.
_IMAGES = (*_WINDOWS, "UpSampling2D", "BatchNormalization")


def operators(model: keras.Model) -> list[Operator]:
    """Read the operators of a model, in the order in which they are computed.

    Example:
        >>> dense = keras.layers.Dense(4, name="dense")
        >>> one, = operators(keras.Sequential([keras.Input((8,), name="x"), dense]))[1:]
        >>> one.name, one.weights, one.flops, one.limits
        ('dense', 36, 64.0, {'output': 4, 'input': 8})
    """
    found: list[Operator] = []
    places: dict[_Output, int] = {}
    calls = _in_order(model.name, _calls(model))
    names = [call.name for call in calls]
    for call in calls:
        sources = tuple(places[source] for source in call.sources)
        given = tuple(found[place] for place in sources)
        layer = _layer(model, call.name)
        first = call.name not in [operator.name for operator in found]
        operator = _operator(layer, call, sources, given, first)
        if names.count(call.name) > 1:
            operator = _kept_whole(operator, "it is called several times")
        places[call.name, call.number] = len(found)
        found.append(operator)
    return found


def outputs(model: keras.Model, found: Sequence[Operator]) -> tuple[int, ...]:
    """Return the positions of the operators whose outputs are the model's."""
    if isinstance(model, keras.Sequential):
        return (len(found) - 1,)
    places: dict[str, list[int]] = {}
    for place, operator in enumerate(found):
        places.setdefault(operator.name, []).append(place)
    ends = _paths(model.get_config()["output_layers"])
    return tuple(sorted({places[name][number] for name, number in ends}))


def slots(model: keras.Model) -> float:
    """Return the numbers that an optimizer remembers for each weight."""
    optimizer = getattr(model, "optimizer", None)
    weights = sum(math.prod(v.shape) for v in model.trainable_variables)
    if optimizer is None or not optimizer.built or not weights:
        return 2.0
    held = sum(math.prod(v.shape) for v in optimizer.variables if len(v.shape))
    return float(held) / weights


# A layer, and which of its calls it is.
_Output: TypeAlias = tuple[str, int]


class _Call(NamedTuple):
    """A call of a layer: its shape is that of a row of what it returns."""

    name: str
    number: int
    shape: Shape
    sources: list[_Output]


def _calls(model: keras.Model) -> list[_Call]:
    """Return the calls of a model's layers, in the order of their layers."""
    if isinstance(model, keras.Sequential):
        return _chain(model)
    if not hasattr(model, "operations"):
        raise PlanError(
            f"model {model.name!r} is a {type(model).__name__}: only functional and Sequential "
            "models say what their layers take; build it with keras.Model(inputs, outputs)"
        )
    config = model.get_config()
    entries = config["layers"]
    taken = [
        (entry["name"], number, list(_tensors(node)))
        for entry in entries
        for number, node in enumerate(entry["inbound_nodes"] or [None])
    ]
    shapes: dict[_Output, Shape] = {}
    for _, _, tensors in taken:
        shapes.update({output: _known(output[0], shape) for output, shape in tensors})
    for path, tensor in zip(_paths(config["output_layers"]), model.outputs, strict=True):
        shapes[path] = _known(path[0], tensor.shape)
    return [
        _Call(name, number, shapes[name, number], [output for output, _ in tensors])
        for name, number, tensors in taken
        if (name, number) in shapes
    ]


def _chain(model: keras.Sequential) -> list[_Call]:
    if not model.built or not model.inputs:
        raise PlanError(
            f"model {model.name!r} does not know its input; begin it with keras.Input(shape)"
        )
    begin = model.inputs[0]
    calls = [_Call(begin.name, 0, _known(begin.name, begin.shape), [])]
    for layer in model.layers:
        shape = _known(layer.name, layer.output.shape)
        calls.append(_Call(layer.name, 0, shape, [(calls[-1].name, 0)]))
    return calls


def _tensors(node: object) -> Iterator[tuple[_Output, Sequence[int | None]]]:
    """Yield the tensors in a call's configuration, as Keras writes them, with their shapes."""
    if isinstance(node, Mapping):
        if node.get("class_name") == "__keras_tensor__":
            name, number, _ = node["config"]["keras_history"]
            yield (name, number), node["config"]["shape"]
            return
        node = list(node.values())
    if isinstance(node, list | tuple):
        for one in node:
            yield from _tensors(one)


def _paths(outputs: object) -> list[_Output]:
    """Return the calls that a model's outputs come from; one of them is not in a list."""
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    assert isinstance(outputs, list | tuple)
    if outputs and isinstance(outputs[0], str):
        return [(outputs[0], outputs[1])]
    return [path for one in outputs for path in _paths(one)]


def _known(name: str, shape: Sequence[int | None]) -> Shape:
    """Return the shape of one row."""
    row = shape[1:]
    if None in row:
        raise PlanError(
            f"layer {name!r} puts out {tuple(shape)}: all but the batch must be known; give "
            "keras.Input the whole shape"
        )
    return tuple(int(size) for size in row if size is not None)


def _in_order(model: str, calls: list[_Call]) -> list[_Call]:
    """Return calls behind those whose outputs they take, and otherwise as they are given."""
    ordered: list[_Call] = []
    done: set[_Output] = set()
    while calls:
        ready = next((call for call in calls if done.issuperset(call.sources)), None)
        if ready is None:
            raise PlanError(f"model {model!r}: {calls[0].name!r} takes what no layer puts out")
        ordered.append(ready)
        done.add((ready.name, ready.number))
        calls = [call for call in calls if call is not ready]
    return ordered


def _layer(model: keras.Model, name: str) -> keras.Operation | None:
    """Return an operation; None for the input of a Sequential model, which is no layer of it."""
    operations = model.layers if isinstance(model, keras.Sequential) else model.operations
    return next((operation for operation in operations if operation.name == name), None)


def _operator(
    layer: keras.Operation | None,
    call: _Call,
    sources: tuple[int, ...],
    given: tuple[Operator, ...],
    first: bool,
) -> Operator:
    kind = type(layer).__name__ if call.sources else "InputLayer"
    taken = tuple(operator.output for operator in given)
    trained = _entries(layer, "trainable_variables") if first else 0
    fixed = _entries(layer, "non_trainable_variables") if first else 0
    operator = Operator(
        call.name,
        kind,
        sources,
        taken,
        call.shape,
        weights=trained,
        fixed=fixed,
        tensors=len(getattr(layer, "trainable_variables", [])) if first else 0,
        flops=_flops(layer, kind, call.shape, taken),
        differentiated=any(one.weights or one.differentiated for one in given),
        batch_statistics=kind == "BatchNormalization",
    )
    if not call.sources or layer is None:
        return operator
    if not isinstance(layer, keras.layers.Layer):
        return _kept_whole(operator, "an operation of keras.ops is no layer")
    limits = {**_channels(layer, kind, taken), **_spatial(layer, kind, call.shape, taken)}
    if not limits:
        return _kept_whole(operator, f"dtk divides no {kind}")
    kernel = getattr(layer, "kernel", None) if kind in _CHANNELS else None
    return replace(
        operator,
        limits=limits,
        follows=_follows(layer),
        kernel=math.prod(kernel.shape) if kernel is not None and kernel.trainable else 0,
        sliced=trained if kind in _CHANNELS else 0,
        halos={split: _halo(layer, kind, taken[0], axis) for axis, split in enumerate(SPATIAL)}
        if SPATIAL[0] in limits
        else {},
        padding=_joined_padding(layer, kind, taken[0]),
    )


def _kept_whole(operator: Operator, reason: str) -> Operator:
    return replace(operator, limits={}, halos={}, whole_because=reason)


def _entries(layer: keras.Operation | None, which: str) -> int:
    variables = getattr(layer, which, [])
    # Seeds of random generators are no weights.
    return sum(math.prod(v.shape) for v in variables if "seed" not in v.name)


def _channels(layer: keras.Operation, kind: str, taken: tuple[Shape, ...]) -> dict[Split, int]:
    """Return among how many ranks a layer's channels can be divided."""
    if kind not in _CHANNELS or getattr(layer, "groups", 1) != 1:
        return {}
    if getattr(layer, "lora_rank", None) or getattr(layer, "quantization_config", None):
        return {}
    first = getattr(layer, "data_format", "channels_last") == "channels_first"
    own = layer.units if kind == "Dense" else layer.filters
    return {"output": int(own), "input": taken[0][0 if first else -1]}


def _spatial(
    layer: keras.layers.Layer, kind: str, output: Shape, taken: tuple[Shape, ...]
) -> dict[Split, int]:
    """Return among how many ranks a layer's rows and columns can be divided."""
    if not (kind in _IMAGES or _follows(layer)) or len(output) != 3:
        return {}
    if getattr(layer, "data_format", "channels_last") != "channels_last":
        return {}
    if getattr(layer, "groups", 1) != 1 or any(len(shape) != 3 for shape in taken):
        return {}
    if kind == "BatchNormalization" and layer.axis not in (-1, 3):
        return {}
    if _follows(layer) and any(shape[:2] != output[:2] for shape in taken):
        return {}
    return {
        split: min(output[axis], *(shape[axis] for shape in taken))
        for axis, split in enumerate(SPATIAL)
    }


def _follows(layer: keras.layers.Layer) -> bool:
    if isinstance(layer, keras.layers.Activation):
        return is_elementwise(layer.activation)
    return isinstance(layer, ELEMENTWISE)


def _halo(layer: keras.Operation, kind: str, taken: Shape, axis: int) -> tuple[int, int]:
    """Return the rows (columns) that an inner rank needs of the neighbour before it and behind it.

    Output rows [a, b) need input rows [a s - p, (b - 1) s - p + (k - 1) d + 1).
    """
    if kind not in _WINDOWS:
        smooth = kind == "UpSampling2D" and layer.interpolation != "nearest"
        return (1, 1) if smooth else (0, 0)
    before = _padding(layer, taken, axis) // 2
    return before, max(0, _reach(layer, axis) - layer.strides[axis] - before)


def _reach(layer: keras.layers.Layer, axis: int) -> int:
    """Return how many rows (columns) of its input an output of a layer with a window sees."""
    window = layer.kernel_size if hasattr(layer, "kernel_size") else layer.pool_size
    dilation = layer.dilation_rate[axis] if hasattr(layer, "kernel_size") else 1
    return int((window[axis] - 1) * dilation + 1)


def _padding(layer: keras.layers.Layer, taken: Shape, axis: int = 0) -> int:
    """Return with how many rows (columns) a layer pads its input, as TensorFlow does."""
    if layer.padding != "same":
        return 0
    stride = layer.strides[axis]
    return max(0, _reach(layer, axis) - (taken[axis] % stride or stride))


def _joined_padding(layer: keras.layers.Layer, kind: str, taken: Shape) -> int:
    """Return with how many rows a layer pads its input before it sends columns of it.

    None where it is a convolution that joins no rows, see `dtk.layers.halo_convolution`.
    """
    if kind not in _WINDOWS or len(taken) != 3:
        return 0
    if kind == "Conv2D" and layer.groups == 1 and max(layer.dilation_rate) == 1:
        return 0
    return _padding(layer, taken)


def _flops(
    layer: keras.Operation | None, kind: str, output: Shape, taken: tuple[Shape, ...]
) -> float:
    """Return the operations of a row, forwards: two for each product of a layer with a kernel."""
    if not taken:
        return 0.0
    entries = math.prod(output)
    if kind == "Dense":
        return 2.0 * entries * taken[0][-1]
    kernel = getattr(layer, "kernel", None)
    if kind in _CONVOLUTIONS and kernel is not None:
        return 2.0 * entries * math.prod(kernel.shape[:-1])
    matrices = [v.shape for v in getattr(layer, "trainable_variables", []) if len(v.shape) > 1]
    products = 2.0 * math.prod(output[:-1]) * sum(map(math.prod, matrices))
    if kind == "Embedding":
        products = 0.0
    return products + float(entries)
