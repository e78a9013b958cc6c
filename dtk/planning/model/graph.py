"""Operators read from a Keras model: shapes, weights, operations and possible divisions."""

from __future__ import annotations

import collections
import math
from dataclasses import replace

import keras

from dtk.layers.halo import Window
from dtk.layers.parallelize import BY_CHANNELS, BY_IMAGE, keeps_parts
from dtk.planning.inputs import PlanError
from dtk.planning.model.layer_costs import SPATIAL, Operator, Shape, Split


def read(model: keras.Model) -> tuple[list[Operator], tuple[int, ...]]:
    """Return a model's operators in the order of computing, and the positions of its outputs.

    Example:
        >>> dense = keras.layers.Dense(4, name="dense")
        >>> (_, one), ends = read(keras.Sequential([keras.Input((8,), name="x"), dense]))
        >>> one.name, one.weights, one.flops, one.limits, ends
        ('dense', 36, 64.0, {'output': 4, 'input': 8}, (1,))
    """
    sequential = isinstance(model, keras.Sequential)
    if sequential and not (model.built and model.inputs):
        raise PlanError(
            f"model {model.name!r} does not know its input; begin it with keras.Input(shape)"
        )
    if not sequential and not hasattr(model, "operations"):
        raise PlanError(
            f"model {model.name!r} is a {type(model).__name__}: only functional and Sequential "
            "models say what their layers take; build it with keras.Model(inputs, outputs)"
        )
    found: list[Operator] = []
    places: dict[int, int] = {}  # id of a tensor -> position of the operator that returns it

    def called(layer: keras.Operation, *args: object, **kwargs: object) -> object:
        result = layer(*args, **kwargs)
        taken = [places[id(one)] for one in _tensors((args, kwargs))]
        first = layer.name not in [operator.name for operator in found]
        shape = _row(layer.name, _tensors(result)[0])
        found.append(_operator(layer, shape, [found[one] for one in taken], tuple(taken), first))
        places.update({id(one): len(found) - 1 for one in _tensors(result)})
        return result

    for number, tensor in enumerate(model.inputs):
        shape = _row(tensor.name, tensor)
        found.append(Operator(tensor.name, "InputLayer", (), (), shape, differentiated=False))
        places[id(tensor)] = number
    # Call the same layers once more, each after its sources.
    plain = keras.Model(model.inputs, model.outputs)
    again = keras.models.clone_model(plain, plain.input, lambda layer: layer, called)
    calls = collections.Counter(operator.name for operator in found)
    for place, operator in enumerate(found):
        if calls[operator.name] > 1:
            found[place] = _kept_whole(operator, "it is called several times")
    return found, tuple(sorted({places[id(one)] for one in again.outputs}))


def slots(model: keras.Model) -> float:
    """Return how many numbers an optimizer stores for each weight."""
    optimizer = getattr(model, "optimizer", None)
    weights = sum(math.prod(v.shape) for v in model.trainable_variables)
    if optimizer is None or not optimizer.built or not weights:
        return 2.0
    return float(sum(math.prod(v.shape) for v in optimizer.variables if len(v.shape))) / weights


def _tensors(nested: object) -> list[keras.KerasTensor]:
    return [one for one in keras.tree.flatten(nested) if isinstance(one, keras.KerasTensor)]


def _row(name: str, tensor: keras.KerasTensor) -> Shape:
    """Return the shape of one row."""
    if None in tensor.shape[1:]:
        raise PlanError(
            f"layer {name!r} puts out {tuple(tensor.shape)}: all but the batch must be known; give "
            "keras.Input the whole shape"
        )
    return tuple(map(int, tensor.shape[1:]))


def _operator(
    layer: keras.Operation,
    output: Shape,
    given: list[Operator],
    sources: tuple[int, ...],
    first: bool,
) -> Operator:
    kind, taken = type(layer), tuple(operator.output for operator in given)
    owner = layer if first and isinstance(layer, keras.layers.Layer) else None
    trained = getattr(owner, "trainable_variables", [])
    operator = Operator(
        layer.name,
        kind.__name__,
        sources,
        taken,
        output,
        weights=_entries(trained),
        fixed=_entries(getattr(owner, "non_trainable_variables", [])),
        tensors=len(trained),
        flops=_flops(layer, output),
        differentiated=any(one.weights or one.differentiated for one in given),
        batch_statistics=isinstance(layer, keras.layers.BatchNormalization),
    )
    if not isinstance(layer, keras.layers.Layer):
        return _kept_whole(operator, "an operation of keras.ops is no layer")
    channels, spatial = _channels(layer, taken), _spatial(layer, output, taken)
    if not channels and not spatial:
        return _kept_whole(operator, f"dtk divides no {kind.__name__}")
    halos: dict[Split, tuple[int, int]] = {}
    for axis, split in enumerate(spatial):
        window = _window(layer, axis)
        before = window.front(taken[0][axis])
        halos[split] = before, max(0, window.extent - window.stride - before)
    return replace(
        operator,
        limits=channels | spatial,
        follows=keeps_parts(layer),
        kernel=math.prod(layer.kernel.shape) if channels and layer.kernel.trainable else 0,
        sliced=operator.weights if channels else 0,
        halos=halos,
    )


def _kept_whole(operator: Operator, reason: str) -> Operator:
    return replace(operator, limits={}, halos={}, whole_because=reason)


def _entries(variables: list[keras.Variable]) -> int:
    # Seeds of random generators are not weights.
    return sum(math.prod(v.shape) for v in variables if "seed" not in v.name)


def _channels(layer: keras.layers.Layer, taken: tuple[Shape, ...]) -> dict[Split, int]:
    """Return how many ranks can share a layer's channels, by split."""
    refused = ("lora_rank", "quantization_config")
    if type(layer) not in BY_CHANNELS or any(getattr(layer, name, None) for name in refused):
        return {}
    if getattr(layer, "groups", 1) != 1:
        return {}
    first = getattr(layer, "data_format", "channels_last") == "channels_first"
    return {"output": int(layer.kernel.shape[-1]), "input": taken[0][0 if first else -1]}


def _spatial(
    layer: keras.layers.Layer, output: Shape, taken: tuple[Shape, ...]
) -> dict[Split, int]:
    """Return how many ranks can share a layer's rows and columns, by split."""
    follows, shapes = keeps_parts(layer), (output, *taken)
    if not (follows or type(layer) in BY_IMAGE) or {len(shape) for shape in shapes} != {3}:
        return {}
    if getattr(layer, "data_format", "channels_last") != "channels_last":
        return {}
    if getattr(layer, "groups", 1) != 1 or getattr(layer, "axis", -1) not in (-1, 3):
        return {}
    if follows and len({shape[:2] for shape in shapes}) > 1:
        return {}
    return {split: min(shape[axis] for shape in shapes) for axis, split in enumerate(SPATIAL)}


def _window(layer: keras.layers.Layer, axis: int) -> Window:
    """Return the window of an output over its input's rows, or columns."""
    if hasattr(layer, "kernel_size"):
        kernel, dilation = layer.kernel_size[axis], layer.dilation_rate[axis]
        return Window(kernel, layer.strides[axis], dilation, layer.padding)
    if hasattr(layer, "pool_size"):
        return Window(layer.pool_size[axis], layer.strides[axis], 1, layer.padding)
    smooth = getattr(layer, "interpolation", "nearest") != "nearest"
    return Window(3, padding="same") if smooth else Window(1)


def _flops(layer: keras.Operation, output: Shape) -> float:
    """Return the forward pass's operations for a row: two for each product with a kernel."""
    entries = float(math.prod(output))
    if type(layer) in BY_CHANNELS:
        return 2.0 * entries * math.prod(layer.kernel.shape[:-1])
    matrices = [v.shape for v in getattr(layer, "trainable_variables", []) if len(v.shape) > 1]
    if isinstance(layer, keras.layers.Embedding) or not matrices:
        return entries
    return 2.0 * math.prod(output[:-1]) * sum(map(math.prod, matrices)) + entries
