"""Seconds of computing by the clock: each layer by itself, at the shapes a rank would have.

A layer's forward pass, and both passes, are run as TensorFlow functions on this machine. That of a
division is measured on a layer made for it: with a part of the filters or of the input channels, or
on some rows and those of neighbours. Fewer rows of the batch are interpolated between three
numbers of them. Layers that are alike are measured once. What the whole model takes, forwards and
backwards, against the sum of its layers is the factor that all numbers are then scaled by.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from dtk.planning.model.layer_costs import Seconds, Work
from dtk.planning.model.operators import SPATIAL, Operator, Shape
from dtk.planning.model.rates import Rates, share

# Seconds that a layer is measured for, and calls at least.
_ENOUGH, _CALLS = 0.03, 4
# Rows of a batch are measured at the batch, and at these parts of it.
_FRACTIONS = (1, 4, 16)
_SIDE = 512  # of the product that rates are measured with
_COPIED = 1 << 22
_UPDATED = 1 << 18

_Clocked: TypeAlias = Callable[[], object]


class _Clock(NamedTuple):
    """Seconds of a call, and how far apart its repetitions were."""

    seconds: float  # the lower quartile: what the call takes where nothing else runs
    spread: float  # half the distance of quartiles, as a part of it


class Measured:
    """Seconds of a model's layers on this machine, each measured when it is first asked for."""

    def __init__(
        self,
        model: keras.Model,
        operators: Sequence[Operator],
        batch: int,
        rates: Rates,
        told: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._layers = _operations(model)
        self._batch, self._rates, self._told = batch, rates, told
        self._known: dict[tuple[str, Work], Seconds] = {}
        self._spreads: list[tuple[float, float]] = []
        self._call = _clock(tf.function(lambda: tf.constant(0.0))).seconds
        self.update = rates.update
        self.factor = 1.0
        apart = sum(
            self.seconds(operator, Work("whole", 1, batch)).both
            for operator in operators
            if not operator.is_input
        )
        told("the whole model")
        whole = self._both(model, _inputs(model, batch), any(one.weights for one in operators))
        if apart > 0 and whole.both > 0:
            self.factor = whole.both / apart

    @property
    def told(self) -> str:
        """A sentence on where the numbers are from."""
        return (
            f"Computing: {len(self._known)} layers and parts of them, measured on this machine and "
            f"scaled by {self.factor:.2f}, which is the whole model's time against its layers'; "
            f"repetitions differ by {100 * self.spread:.0f} %."
        )

    @property
    def spread(self) -> float:
        """How far a number is off, as a part of it: that of long layers counts most."""
        total = sum(seconds for seconds, _ in self._spreads)
        return sum(s * spread for s, spread in self._spreads) / total if total else 0.0

    def seconds(self, operator: Operator, work: Work) -> Seconds:
        """Return the seconds of the busiest rank, measured or interpolated."""
        found = self._whole(operator, work.rows) if work.split == "whole" else None
        if found is None:
            found = self._part(operator, work)
        return Seconds(self.factor * found.forward, self.factor * found.backward)

    def _whole(self, operator: Operator, rows: int) -> Seconds:
        """Return the seconds of all of an operator, between measured numbers of rows."""
        points = sorted({max(1, self._batch // part) for part in _FRACTIONS})
        if rows in points or len(points) == 1:
            scale = 1.0 if rows in points else rows / points[0]
            one = self._clocked(operator, Work("whole", 1, rows if rows in points else points[0]))
            return Seconds(scale * one.forward, scale * one.backward)
        high = next((point for point in points[1:] if point > rows), points[-1])
        low = points[points.index(high) - 1]
        ends = [self._clocked(operator, Work("whole", 1, point)) for point in (low, high)]
        part = (rows - low) / (high - low)

        def between(one: float, other: float) -> float:
            return max(0.0, one + part * (other - one))

        return Seconds(
            between(ends[0].forward, ends[1].forward), between(ends[0].backward, ends[1].backward)
        )

    def _part(self, operator: Operator, work: Work) -> Seconds:
        layer = self._layers[operator.name]
        if hasattr(layer, "kernel") or hasattr(layer, "pool_size"):
            return self._clocked(operator, work)
        # Nothing but copies: they take as long as their part of the entries.
        part, whole = share(operator, work), self._whole(operator, work.rows)
        return Seconds(part * whole.forward, part * whole.backward)

    def _clocked(self, operator: Operator, work: Work) -> Seconds:
        key = _signature(self._layers[operator.name], operator), work
        if key not in self._known:
            self._told(f"{operator.name} {work.split} / {work.degree}, {work.rows} rows")
            self._known[key] = self._measure(operator, work)
        return self._known[key]

    def _measure(self, operator: Operator, work: Work) -> Seconds:
        layer = self._layers[operator.name]
        if work.split == "whole":
            try:
                call = keras.Model(layer.input, layer.output)
            except (ValueError, AttributeError):  # it is called several times
                return self._rates.seconds(operator, work)
            return self._both(call, _inputs(call, work.rows), operator.differentiated)
        local, shape = _local(layer, operator, work)
        return self._both(local, [tf.random.normal([work.rows, *shape])], operator.differentiated)

    def _both(
        self, call: keras.Layer, inputs: Sequence[tf.Tensor], differentiated: bool
    ) -> Seconds:
        """Return the seconds of a call forwards, and of its gradients."""
        given = inputs[0] if len(inputs) == 1 else list(inputs)
        call(given)  # builds it
        floats = [one for one in inputs if one.dtype.is_floating] if differentiated else []

        @tf.function
        def forward() -> object:
            return tf.nest.flatten(call(given, training=True))

        @tf.function
        def both() -> object:
            variables = [v.value for v in call.trainable_variables]
            with tf.GradientTape() as tape:
                tape.watch(floats)
                outputs = tf.nest.flatten(call(given, training=True))
            return tape.gradient(outputs, [*variables, *floats]), outputs

        there = self._seconds(forward)
        if not floats and not call.trainable_variables:
            return Seconds(there, 0.0)
        return Seconds(there, max(0.0, self._seconds(both) - there))

    def _seconds(self, work: _Clocked) -> float:
        found = _clock(work)
        self._spreads.append((found.seconds, found.spread))
        return max(0.0, found.seconds - self._call)


def rates_here(optimizer: keras.Optimizer | None = None) -> Rates:
    """Measure a product of matrices, a copy and an update on this machine."""
    square = tf.random.normal([_SIDE, _SIDE])
    product = _clock(tf.function(lambda: square @ square)).seconds
    long = tf.zeros([_COPIED], tf.float32)
    copied = _clock(tf.function(lambda: long + 1.0)).seconds
    config = None if optimizer is None else optimizer.get_config()
    kind = keras.optimizers.Adam if optimizer is None else type(optimizer)
    fresh = kind() if config is None else kind.from_config(config)
    weights = keras.Variable(np.zeros(_UPDATED, "float32"))
    gradient = tf.ones([_UPDATED])
    fresh.build([weights])
    updated = _clock(tf.function(lambda: fresh.apply([gradient], [weights]))).seconds
    return Rates(
        flops=2 * _SIDE**3 / product,
        nbytes=2 * _COPIED * long.dtype.size / copied,
        update=updated / _UPDATED,
    )


def _clock(work: _Clocked) -> _Clock:
    """Measure a call that has no results but tensors, after two that trace and warm up."""
    work()
    work()
    took: list[float] = []
    while len(took) < _CALLS or sum(took) < _ENOUGH:
        began = time.perf_counter()
        done = work()
        # A result that is read is there.
        for one in tf.nest.flatten(done)[-1:]:
            if tf.is_tensor(one):
                one.numpy()
        took.append(time.perf_counter() - began)
    first, _, third = statistics.quantiles(took, n=4)
    return _Clock(first, (third - first) / 2 / first)


def _operations(model: keras.Model) -> dict[str, keras.Operation]:
    found = model.layers if isinstance(model, keras.Sequential) else model.operations
    return {operation.name: operation for operation in found}


def _inputs(model: keras.Model, rows: int) -> list[tf.Tensor]:
    """Return rows for a model: random numbers, and for whole numbers zeros, which any table has."""
    found = []
    for tensor in model.inputs:
        shape = [rows, *tensor.shape[1:]]
        dtype = tf.as_dtype(tensor.dtype)
        found.append(
            tf.random.normal(shape, dtype=dtype) if dtype.is_floating else tf.zeros(shape, dtype)
        )
    return found


def _local(
    layer: keras.layers.Layer, operator: Operator, work: Work
) -> tuple[keras.layers.Layer, Shape]:
    """Return a layer that does one rank's part, and the shape of a row of what it takes."""
    config = {**layer.get_config(), "name": f"part_of_{layer.name}"}
    config.pop("build_config", None)
    shape = list(operator.taken[0])
    if work.split == "output":
        size = "units" if "units" in config else "filters"
        config[size] = math.ceil(config[size] / work.degree)
    elif work.split == "input":
        first = config.get("data_format") == "channels_first"
        axis = 0 if first else -1
        shape[axis] = math.ceil(shape[axis] / work.degree)
    else:
        axis = SPATIAL.index(work.split)
        halo = sum(operator.halos.get(work.split, (0, 0)))
        shape[axis] = min(shape[axis], math.ceil(shape[axis] / work.degree) + halo)
    return type(layer).from_config(config), tuple(shape)


def _signature(layer: keras.Operation, operator: Operator) -> str:
    """Return what two layers that take equally long have in common."""
    facts: object = layer.name
    if isinstance(layer, keras.layers.Layer):
        facts = {**layer.get_config(), "name": None}
    known = (type(layer).__name__, operator.taken, operator.output, operator.differentiated)
    return json.dumps([known, facts], default=str, sort_keys=True)
