"""Seconds of computing by the clock: each layer by itself, at the shapes a rank would have.

A layer's forward pass, and both passes, are run as TensorFlow functions on this machine. That of a
division is measured on a layer made for it: with a part of the filters or of the input channels, or
on some rows and those of neighbours. Fewer rows of the batch are interpolated. Layers that are
alike are measured once. What the whole model takes, forwards and backwards, against the sum of its
layers is the factor that all numbers are then scaled by.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from dtk.planning.model.layer_costs import SPATIAL, Operator, Rates, Work

# Seconds that a layer is measured for, and calls at least.
_ENOUGH, _CALLS = 0.03, 4
# Rows of a batch are measured at the batch, and at these parts of it.
_FRACTIONS = (1, 4, 16)
_SIDE = 512  # of the product that rates are measured with
_COPIED = 1 << 22
_UPDATED = 1 << 18


class MeasuredRates(Rates):
    """Seconds of a model's layers on this machine, each measured when it is first asked for."""

    def __init__(
        self,
        model: keras.Model,
        operators: Sequence[Operator],
        batch: int,
        rates: Rates,
        say: Callable[[str], None] = lambda name: None,
    ) -> None:
        super().__init__(rates.flops, rates.nbytes, rates.update)
        sequential = isinstance(model, keras.Sequential)
        layers = model.layers if sequential else model.operations
        self._layers = {layer.name: layer for layer in layers}
        self._batch, self._say = batch, say
        self._known: dict[tuple[str, Work], float] = {}
        self._spreads: list[tuple[float, float]] = []
        self._call = _clock(tf.function(lambda: tf.constant(0.0)))[0]
        self.factor = 1.0
        computed = [one for one in operators if one.sources]
        apart = sum(self.seconds(one, Work("whole", 1, batch)) for one in computed)
        say("the whole model")
        whole = self._measure(model, _inputs(model, batch), any(one.weights for one in computed))
        if apart > 0 and whole > 0:
            self.factor = whole / apart

    @property
    def told(self) -> str:
        """A sentence on where the numbers are from."""
        return (
            f"Computing: {len(self._known)} layers and parts of them, measured on this machine and "
            f"scaled by {self.factor:.2f}, which is the whole model's time against its layers'; "
            f"repetitions differ by {100 * self.spread:.0f} %."
        )

    def seconds(self, operator: Operator, work: Work) -> float:
        """Return the seconds of the busiest rank, measured or interpolated."""
        layer = self._layers[operator.name]
        if work.split != "whole" and (hasattr(layer, "kernel") or hasattr(layer, "pool_size")):
            return self.factor * self._clocked(operator, work)
        # A part of what has no kernel is copies: they take as long as their part of the entries.
        return self.factor * work.share(operator) * self._whole(operator, work.rows)

    def _whole(self, operator: Operator, rows: int) -> float:
        """Return the seconds of all of an operator, on a line between measured numbers of rows."""
        points = sorted({max(1, self._batch // part) for part in _FRACTIONS})
        if rows in points:
            return self._clocked(operator, Work("whole", 1, rows))
        high = min(point for point in points[1:] if point >= rows)
        low = points[points.index(high) - 1]
        less, more = (self._clocked(operator, Work("whole", 1, point)) for point in (low, high))
        return max(0.0, less + (rows - low) / (high - low) * (more - less))

    def _clocked(self, operator: Operator, work: Work) -> float:
        """Return what a layer takes, at the shapes of a rank."""
        layer = self._layers[operator.name]
        facts = layer.get_config() if isinstance(layer, keras.layers.Layer) else {}
        # What two layers that take equally long have in common.
        alike = (type(layer).__name__, operator.taken, operator.output, operator.differentiated)
        key = json.dumps([alike, {**facts, "name": None}], default=str, sort_keys=True), work
        if key in self._known:
            return self._known[key]
        self._say(f"{operator.name} {work.split} / {work.degree}, {work.rows} rows")
        if work.split != "whole":
            call, shape = _local(layer, operator, work)
            inputs = [tf.random.normal([work.rows, *shape])]
        else:
            try:
                call = keras.Model(layer.input, layer.output)
            except (ValueError, AttributeError):  # it has several outputs, or none of its own
                return super().seconds(operator, work)
            inputs = _inputs(call, work.rows)
        self._known[key] = self._measure(call, inputs, operator.differentiated)
        return self._known[key]

    def _measure(
        self, call: keras.Layer, inputs: Sequence[tf.Tensor], differentiated: bool
    ) -> float:
        """Return the seconds of a call, and of its gradients where there are any."""
        given = inputs[0] if len(inputs) == 1 else list(inputs)
        call(given)  # builds it
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
        # What takes long counts most.
        self.spread = sum(s * one for s, one in self._spreads) / sum(s for s, _ in self._spreads)
        return max(0.0, seconds - self._call)


def rates_here(optimizer: keras.Optimizer | None = None) -> Rates:
    """Measure a product of matrices, a copy and an update on this machine."""
    square, long = tf.random.normal([_SIDE, _SIDE]), tf.zeros([_COPIED], tf.float32)
    product, _ = _clock(tf.function(lambda: square @ square))
    copied, _ = _clock(tf.function(lambda: long + 1.0))
    fresh = keras.optimizers.Adam()
    if optimizer is not None:
        fresh = type(optimizer).from_config(optimizer.get_config())
    weights, gradient = keras.Variable(np.zeros(_UPDATED, "float32")), tf.ones([_UPDATED])
    fresh.build([weights])
    updated, _ = _clock(tf.function(lambda: fresh.apply([gradient], [weights])))
    return Rates(2 * _SIDE**3 / product, 2 * _COPIED * long.dtype.size / copied, updated / _UPDATED)


def _clock(work: Callable[[], object]) -> tuple[float, float]:
    """Measure a call that has no results but tensors, after two that trace and warm up.

    Returns the lower quartile, which is what it takes where nothing else runs, and half the
    distance of quartiles, as a part of it.
    """
    work()
    work()
    took: list[float] = []
    while len(took) < _CALLS or sum(took) < _ENOUGH:
        began = time.perf_counter()
        # A result that is read is there.
        for one in tf.nest.flatten(work())[-1:]:
            if tf.is_tensor(one):
                one.numpy()
        took.append(time.perf_counter() - began)
    first, _, third = statistics.quantiles(took, n=4)
    return first, (third - first) / 2 / first


def _inputs(model: keras.Model, rows: int) -> list[tf.Tensor]:
    """Return rows for a model: random numbers, and for whole numbers zeros, which any table has."""
    found = []
    for tensor in model.inputs:
        shape, dtype = [rows, *tensor.shape[1:]], tf.as_dtype(tensor.dtype)
        floating = dtype.is_floating
        found.append(tf.random.normal(shape, dtype=dtype) if floating else tf.zeros(shape, dtype))
    return found


def _local(
    layer: keras.layers.Layer, operator: Operator, work: Work
) -> tuple[keras.layers.Layer, list[int]]:
    """Return a layer that does one rank's part, and the shape of a row of what it takes."""
    config = {**layer.get_config(), "name": f"part_of_{layer.name}"}
    config.pop("build_config", None)
    shape = list(operator.taken[0])
    if work.split == "output":
        size = "units" if "units" in config else "filters"
        config[size] = math.ceil(config[size] / work.degree)
    elif work.split == "input":
        axis = 0 if config.get("data_format") == "channels_first" else -1
        shape[axis] = math.ceil(shape[axis] / work.degree)
    else:
        axis = SPATIAL.index(work.split)
        halo = sum(operator.halos.get(work.split, (0, 0)))
        shape[axis] = min(shape[axis], math.ceil(shape[axis] / work.degree) + halo)
    return type(layer).from_config(config), shape
