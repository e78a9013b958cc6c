"""Operators read from a Keras model: shapes, weights, operations and possible divisions."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from dataclasses import replace

import keras

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
    if isinstance(model, keras.Sequential):
        if not (model.built and model.inputs):
            raise PlanError(
                f"model {model.name!r} does not know its input; begin it with keras.Input(shape)"
            )
    elif not hasattr(model, "operations"):
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
        found.append(Operator(tensor.name, (), (), shape, differentiated=False))
        places[id(tensor)] = number
    # Call the same layers once more, each after its sources.
    plain = keras.Model(model.inputs, model.outputs)
    again = keras.models.clone_model(plain, plain.input, lambda layer: layer, called)
    calls = collections.Counter(operator.name for operator in found)
    for place, operator in enumerate(found):
        if calls[operator.name] > 1:
            why = "it is called several times"
            found[place] = replace(operator, limits={}, halos={}, whole_because=why)
    return found, tuple(sorted({places[id(one)] for one in again.outputs}))


def slots(model: keras.Model) -> float:
    """Return how many numbers an optimizer stores for each weight."""
    optimizer, weights = getattr(model, "optimizer", None), _entries(model.trainable_variables)
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
    taken = tuple(operator.output for operator in given)
    owner = layer if first and isinstance(layer, keras.layers.Layer) else None
    trained = getattr(owner, "trainable_variables", [])
    limits, halos = _divisions(layer, output, taken)
    channels = "output" in limits
    why = "" if limits else f"dtk divides no {type(layer).__name__}"
    if not isinstance(layer, keras.layers.Layer):
        why = "an operation of keras.ops is no layer"
    return Operator(
        layer.name,
        sources,
        taken,
        output,
        weights=_entries(trained),
        kernel=math.prod(layer.kernel.shape) if channels and layer.kernel.trainable else 0,
        fixed=_entries(getattr(owner, "non_trainable_variables", [])),
        flops=_flops(layer, output),
        limits=limits,
        halos=halos,
        tensors=len(trained),
        follows=keeps_parts(layer),
        differentiated=any(one.weights or one.differentiated for one in given),
        batch_statistics=isinstance(layer, keras.layers.BatchNormalization),
        whole_because=why,
    )


def _entries(variables: list[keras.Variable]) -> int:
    # Seeds of random generators are not weights.
    return sum(math.prod(v.shape) for v in variables if "seed" not in v.name)


def _divisions(
    layer: keras.Operation, output: Shape, taken: tuple[Shape, ...]
) -> tuple[dict[Split, int], dict[Split, tuple[int, int]]]:
    """Return how many ranks can share a layer, and its halos, by split."""
    limits: dict[Split, int] = {}
    if _in_parts(layer, BY_CHANNELS) is not None:
        first = getattr(layer, "data_format", "channels_last") == "channels_first"
        limits = {"output": int(layer.kernel.shape[-1]), "input": taken[0][0 if first else -1]}
    follows, shapes = keeps_parts(layer), (output, *taken)
    part = layer if follows else _in_parts(layer, BY_IMAGE)
    image = {len(shape) for shape in shapes} == {3} and (
        getattr(part, "data_format", "channels_last") == "channels_last"
    )
    if part is None or not image or (follows and len({shape[:2] for shape in shapes}) > 1):
        return limits, {}
    halos: dict[Split, tuple[int, int]] = {}
    for axis, split in enumerate(SPATIAL):
        limits[split] = min(shape[axis] for shape in shapes)
        halos[split] = (0, 0) if follows else _halo(part, axis, taken[0][axis])
    return limits, halos


def _in_parts(
    layer: keras.Operation, kinds: Mapping[type[keras.Layer], type[keras.Layer]]
) -> keras.Layer | None:
    """Return the layer that `parallelize` would put in place of this one, if it can."""
    try:
        return kinds[type(layer)].from_config(layer.get_config())
    except (KeyError, TypeError):  # no such kind; Keras says TypeError of what is refused
        return None


def _halo(part: keras.Layer, axis: int, length: int) -> tuple[int, int]:
    """Return how many rows (columns) an inner rank needs from either neighbour."""
    windows = part.windows()
    if windows is None:
        beside = int(getattr(part, "interpolation", "nearest") != "nearest")
        return beside, beside
    before = windows[axis].front(length)
    return before, max(0, windows[axis].extent - windows[axis].stride - before)


def _flops(layer: keras.Operation, output: Shape) -> float:
    """Return the forward pass's operations for a row: two for each product with a kernel."""
    entries = float(math.prod(output))
    if type(layer) in BY_CHANNELS:
        return 2.0 * entries * math.prod(layer.kernel.shape[:-1])
    matrices = [v.shape for v in getattr(layer, "trainable_variables", []) if len(v.shape) > 1]
    if isinstance(layer, keras.layers.Embedding) or not matrices:
        return entries
    return 2.0 * math.prod(output[:-1]) * sum(map(math.prod, matrices)) + entries
