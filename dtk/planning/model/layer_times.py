"""Measured seconds of computing: each layer by itself, at the shapes that a rank would have.

A layer's passes run as TensorFlow functions on this machine. For a divided layer we measure a
smaller layer: with a part of the filters or of the input channels, or on some rows with their
halos. For fewer rows of the batch we interpolate. Equal layers are measured once. All numbers are
then scaled by one factor: the time of the whole model over the sum of its layers.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from dtk.planning.model.layer_costs import SPATIAL, WHOLE, Operator, Part, Rates

# A layer is measured for at least so many seconds and calls.
_ENOUGH, _CALLS = 0.03, 4
# A layer is measured at the whole batch and at parts of it; these are the divisors.
_FRACTIONS = (1, 4, 16)
_SIDE = 512  # side of the matrices in the product that rates are measured with
_COPIED = 1 << 22
_UPDATED = 1 << 18


class MeasuredRates(Rates):
    """Seconds of a model's layers on this machine; each is measured on first use."""

    def __init__(
        self,
        model: keras.Model,
        operators: Sequence[Operator],
        batch: int,
        rates: Rates,
        say: Callable[[str], None] = lambda name: None,
    ) -> None:
        super().__init__(rates.flops, rates.nbytes, rates.update)
        plain = keras.Model(model.inputs, model.outputs)
        self._layers = {layer.name: layer for layer in plain.operations}
        self._points = sorted({max(1, batch // part) for part in _FRACTIONS})
        self._say, self.factor = say, 1.0
        self._known: dict[tuple[object, ...], float] = {}
        self._spreads: list[tuple[float, float]] = []
        self._call = _clock(tf.function(lambda: tf.constant(0.0)))[0]
        computed = [one for one in operators if one.sources]
        apart = sum(self.seconds(one, batch) for one in computed)
        say("the whole model")
        whole = self._measure(model, _inputs(model, batch), any(one.weights for one in computed))
        if apart > 0 and whole > 0:
            self.factor = whole / apart

    @property
    def told(self) -> str:
        """A sentence on the origin of the numbers."""
        return (
            f"Computing: {len(self._known)} layers and parts of them, measured on this machine and "
            f"scaled by {self.factor:.2f}, which is the whole model's time against its layers'; "
            f"repetitions differ by {100 * self.spread:.0f} %."
        )

    def seconds(self, operator: Operator, rows: int, part: Part = WHOLE) -> float:
        """Return the seconds of the busiest rank, measured or interpolated."""
        layer = self._layers[operator.name]
        if part[0] != "whole" and (hasattr(layer, "kernel") or hasattr(layer, "pool_size")):
            return self.factor * self._clocked(operator, rows, part)
        # Layers without a kernel copy entries: their time is proportional to the entries.
        return self.factor * operator.share(part) * self._interpolated(operator, rows)

    def _interpolated(self, operator: Operator, rows: int) -> float:
        """Return the seconds of a whole operator, from the nearest measured row counts."""
        if rows in self._points:
            return self._clocked(operator, rows)
        high = min(point for point in self._points[1:] if point >= rows)
        low = self._points[self._points.index(high) - 1]
        less, more = (self._clocked(operator, point) for point in (low, high))
        return max(0.0, less + (rows - low) / (high - low) * (more - less))

    def _clocked(self, operator: Operator, rows: int, part: Part = WHOLE) -> float:
        """Return the measured seconds of a layer, at the shapes of a rank."""
        layer = self._layers[operator.name]
        facts = layer.get_config() if isinstance(layer, keras.layers.Layer) else {}
        # Layers with equal keys take equally long.
        alike = operator.taken, operator.output, operator.differentiated
        key = type(layer), *alike, str({**facts, "name": None}), rows, part
        if key in self._known:
            return self._known[key]
        self._say(f"{operator.name} {part[0]} / {part[1]}, {rows} rows")
        if part != WHOLE:
            call, shape = _local(layer, operator, part)
            inputs = [tf.random.normal([rows, *shape])]
        else:
            try:
                call = keras.Model(layer.input, layer.output)
            except (ValueError, AttributeError):  # the layer has several outputs, or none
                return super().seconds(operator, rows)
            inputs = _inputs(call, rows)
        self._known[key] = self._measure(call, inputs, operator.differentiated)
        return self._known[key]

    def _measure(
        self, call: keras.Layer, inputs: Sequence[tf.Tensor], differentiated: bool
    ) -> float:
        """Return the seconds of a call and its gradients, if it has any."""
        given = inputs[0] if len(inputs) == 1 else list(inputs)
        call(given)  # builds the layer
        floats = [one for one in inputs if one.dtype.is_floating] if differentiated else []
        variables = [v.value for v in call.trainable_variables]

        @tf.function
        def step() -> object:
            with tf.GradientTape() as tape:
                tape.watch(floats)
                outputs = tf.nest.flatten(call(given, training=True))
            sources = [*variables, *floats]
            return (tape.gradient(outputs, sources) if sources else []), outputs

        seconds, spread = _clock(step)
        self._spreads.append((seconds, spread))
        # Weighted by seconds: long calls count most.
        self.spread = sum(s * one for s, one in self._spreads) / sum(s for s, _ in self._spreads)
        return max(0.0, seconds - self._call)


def rates_here(optimizer: keras.Optimizer | None = None) -> Rates:
    """Measure a matrix product, a copy and an update on this machine."""
    square, long = tf.random.normal([_SIDE, _SIDE]), tf.zeros([_COPIED], tf.float32)
    product, _ = _clock(tf.function(lambda: square @ square))
    copied, _ = _clock(tf.function(lambda: long + 1.0))
    like = optimizer or keras.optimizers.Adam()
    fresh = type(like).from_config(like.get_config())
    weights, gradient = keras.Variable(np.zeros(_UPDATED, "float32")), tf.ones([_UPDATED])
    fresh.build([weights])
    updated, _ = _clock(tf.function(lambda: fresh.apply([gradient], [weights])))
    return Rates(2 * _SIDE**3 / product, 2 * _COPIED * long.dtype.size / copied, updated / _UPDATED)


def _clock(work: Callable[[], object]) -> tuple[float, float]:
    """Measure a call that returns only tensors, after two calls that trace and warm up.

    Returns the lower quartile, which is close to the time on an idle machine, and half the distance
    of the quartiles, relative to it.
    """
    work()
    work()
    took: list[float] = []
    while len(took) < _CALLS or sum(took) < _ENOUGH:
        began = time.perf_counter()
        # Reading a result waits until it is ready.
        for one in filter(tf.is_tensor, tf.nest.flatten(work())[-1:]):
            one.numpy()
        took.append(time.perf_counter() - began)
    first, _, third = statistics.quantiles(took, n=4)
    return first, (third - first) / 2 / first


def _inputs(model: keras.Model, rows: int) -> list[tf.Tensor]:
    """Return input rows: random floats, and integers of 0, since every table has row 0."""
    shapes = [(tf.as_dtype(one.dtype), [rows, *one.shape[1:]]) for one in model.inputs]
    return [
        tf.random.normal(shape, dtype=dtype) if dtype.is_floating else tf.zeros(shape, dtype)
        for dtype, shape in shapes
    ]


def _local(
    layer: keras.layers.Layer, operator: Operator, part: Part
) -> tuple[keras.layers.Layer, list[int]]:
    """Return a layer that computes one rank's part, and the shape of one row of its input."""
    config = {**layer.get_config(), "name": f"part_of_{layer.name}"}
    config.pop("build_config", None)
    (split, degree), shape = part, list(operator.taken[0])
    if split == "output":
        size = "units" if "units" in config else "filters"
        config[size] = math.ceil(config[size] / degree)
    elif split == "input":
        axis = 0 if config.get("data_format") == "channels_first" else -1
        shape[axis] = math.ceil(shape[axis] / degree)
    else:
        axis = SPATIAL.index(split)
        halo = sum(operator.halos.get(split, (0, 0)))
        shape[axis] = min(shape[axis], math.ceil(shape[axis] / degree) + halo)
    return type(layer).from_config(config), shape
