"""Layers over images of which each rank has some rows or columns; results equal one device's.

    x -> SplitRows -> SpatiallyParallelConv2D -> ... -> GatherRows -> y
         slice        halo exchange, convolution        allgather

Between the borders a tensor holds this rank's rows only, and Keras's shapes count only these. When
a layer is built, ranks tell each other how many rows each has; the numbers need not be equal. Each
layer divides its output's rows as evenly as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.local import LocalCommunicator
from dtk.communicators.shard import Shard
from dtk.errors import at_rank
from dtk.even_division import even_sizes
from dtk.layers.halo import Halo, HaloExchange, Range, Window, convolve, fits, ranges_of
from dtk.layers.regions import (
    agreed_lengths,
    copy_to_group,
    gather_from_group,
    model_group,
    reduce_from_group,
    scatter_to_group,
)
from dtk.nests import Config

# One group divides rows or columns; in a pair, the first divides rows and the second columns.
Groups: TypeAlias = "Communicator | tuple[Communicator, Communicator] | None"
Shape: TypeAlias = Sequence[int | None]


class SpatiallyParallel(keras.layers.Layer):
    """Base of layers that see part of an image; list it before the Keras layer in the base classes.

    Args:
        args: Arguments of the Keras layer.
        split: "rows", "columns" or "both": what ranks divide.
        communicator: Communicator of the ranks that divide the image, in the order of their parts.
            For "both" a pair: first the ranks that have this rank's columns and divide rows, then
            the ranks that have its rows and divide columns. None: `model_communicator` of the
            strategy in whose scope the layer is built. It is not part of the configuration.
        kwargs: Arguments of the Keras layer.

    Raises:
        ValueError: Arguments contradict each other, or do not work in parts.
    """

    communicates = True

    def __init__(
        self, *args: object, split: str = "rows", communicator: Groups = None, **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)
        self.split = split
        self.supports_jit = False  # XLA cannot compile communication
        self._given = communicator
        # Of rows and of columns: the ranks that divide them, what they exchange, and how many
        # outputs each rank computes.
        self._groups: tuple[Communicator, ...] = ()
        self._exchanges: tuple[HaloExchange, ...] = ()
        self._outputs: tuple[tuple[int, ...], ...] = ()
        if split not in ("rows", "columns", "both"):
            self._refuse(f"split={split!r}", "'rows', 'columns' or 'both'")
        if (split == "both") != isinstance(communicator, tuple):
            self._refuse(
                f"split={split!r} with communicator={communicator!r}",
                "a pair of communicators for 'both', and one for 'rows' or 'columns'",
            )
        if self.activity_regularizer is not None:
            self._refuse("activity_regularizer", "it on a layer behind GatherRows")
        self._check_arguments()

    def _check_arguments(self) -> None:
        """Raise a ValueError for arguments that do not work in parts."""

    def _refuse(self, setting: str, expected: str) -> NoReturn:
        """Raise a ValueError that names the layer, what it refuses, and what to use instead."""
        raise ValueError(f"layer {self.name!r}: {setting}; use {expected}")

    def windows(self) -> tuple[Window, Window] | None:
        """Return the windows over rows and columns; None if outputs need no other rank's rows."""
        return None

    def _needed(self, axis: int, inputs: Sequence[int]) -> tuple[tuple[Range, ...], list[int]]:
        """Return the range of an axis that every rank needs, and the length that it computes.

        The axis is 0 for rows and 1 for columns; `inputs` are the lengths of all ranks' parts.
        """
        windows = self.windows()
        if windows is None:
            return tuple(ranges_of(inputs)), list(inputs)
        window, length = windows[axis], sum(inputs)
        outputs = even_sizes(window.outputs(length), len(inputs))
        if not min(outputs):
            made = f"{sum(outputs)} {('rows', 'columns')[axis]} of {length}"
            message = (
                f"layer {self.name!r} makes {made}, for {len(inputs)} ranks; gather the image in "
                "front of it (GatherRows), or use fewer ranks"
            )
            raise ValueError(at_rank(self._groups[axis].rank, message))
        needs = [window.needs(part, length) for part in ranges_of(outputs)]
        return tuple(needs), outputs

    def build(self, input_shape: Shape) -> None:
        """Agree with the other ranks on which rank has which rows, and make the variables."""
        if isinstance(self._given, tuple):
            self._groups = self._given
        else:
            pair = model_group(self._given), LocalCommunicator()
            self._groups = pair if self.split == "rows" else pair[::-1]
        whole = list(input_shape)
        exchanges, parts = [], []
        channels_first = getattr(self, "data_format", "channels_last") == "channels_first"
        for axis, group in enumerate(self._groups):
            place = axis + (2 if channels_first else 1)
            inputs = agreed_lengths(known_length(self, input_shape, place), group)
            whole[place] = sum(inputs)
            needs, outputs = self._needed(axis, inputs)
            exchanges.append(HaloExchange(place, Halo(inputs, needs), group))
            parts.append(tuple(outputs))
        super().build(tuple(whole))
        self._exchanges, self._outputs = tuple(exchanges), tuple(parts)

    def _with_halo(self, inputs: tf.Tensor, padding: float | None = 0.0) -> tf.Tensor:
        """Return this rank's rows and columns with padding and the ones it needs of other ranks."""
        for exchange in self._exchanges:
            inputs = exchange(inputs, padding)
        return inputs

    def _copied(self, weight: tf.Tensor | keras.Variable) -> tf.Tensor:
        """Return a weight, equal on all ranks; its gradient is summed over all parts."""
        value = tf.convert_to_tensor(weight)
        for group in self._groups:
            if group.size > 1:
                value = copy_to_group(value, group)
        return value

    def compute_output_shape(self, input_shape: Shape) -> tuple[int | None, ...]:
        """Return the shape of this rank's part of the output."""
        if not self._exchanges:
            shape: tuple[int | None, ...] = super().compute_output_shape(input_shape)
            return shape
        whole = list(input_shape)
        for exchange in self._exchanges:
            whole[exchange.axis] = sum(exchange.halo.sizes)
        outputs = list(super().compute_output_shape(tuple(whole)))
        for exchange, sizes in zip(self._exchanges, self._outputs, strict=True):
            outputs[exchange.axis] = sizes[exchange.communicator.rank]
        return tuple(outputs)

    def get_config(self) -> Config:
        """Return the configuration of the Keras layer, and `split`."""
        return {**super().get_config(), "split": self.split}


def known_length(layer: keras.layers.Layer, shape: Shape, axis: int) -> int:
    """Return the length of an image along an axis; raise if it is not known."""
    length = shape[axis]
    if length is None:
        raise ValueError(
            f"layer {layer.name!r}: an image of unknown size, shape {tuple(shape)}; use an Input "
            "whose rows and columns are given"
        )
    return length


class Border(keras.layers.Layer):
    """Base of the layers that divide or gather an image.

    Args:
        communicator: Communicator of the ranks that divide the image, in the order of their parts;
            `model_communicator` of the strategy in whose scope the layer is built when None.
        data_format: "channels_last" or "channels_first"; Keras's when None.
        kwargs: Arguments of a Keras layer.
    """

    communicates = True
    place = 0
    splits = True

    def __init__(
        self,
        communicator: Communicator | None = None,
        data_format: str | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        self.data_format = data_format or keras.config.image_data_format()
        self.supports_jit = False
        self._given = communicator
        self._shard: Shard | None = None

    @property
    def shard(self) -> Shard:
        """How the image is divided, once the layer is built."""
        if self._shard is None:
            raise ValueError(f"layer {self.name!r} is not built yet; call it, or its `build`")
        return self._shard

    def build(self, input_shape: Shape) -> None:
        """Agree on which rank has which rows."""
        axis = self.place + (2 if self.data_format == "channels_first" else 1)
        length = known_length(self, input_shape, axis)
        group = model_group(self._given)
        if self.splits:
            self._shard = Shard.evenly(length, axis, group)
        else:
            self._shard = Shard(axis, agreed_lengths(length, group), group)
        super().build(input_shape)

    def get_config(self) -> Config:
        """Return the configuration, without the communicator."""
        return {**super().get_config(), "data_format": self.data_format}


@keras.saving.register_keras_serializable(package="dtk")
class SplitRows(Border):
    """Gives each rank some of an image's rows: as even as possible, the first ranks one more."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return this rank's part."""
        return scatter_to_group(inputs, self.shard)

    def compute_output_shape(self, input_shape: Shape) -> tuple[int | None, ...]:
        """Return the shape of this rank's part."""
        return self.shard.part_shape(input_shape)


@keras.saving.register_keras_serializable(package="dtk")
class GatherRows(Border):
    """Gives every rank all of an image's rows, however many each has."""

    splits = False

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return the image, equal on all ranks."""
        return gather_from_group(inputs, self.shard)

    def compute_output_shape(self, input_shape: Shape) -> tuple[int | None, ...]:
        """Return the shape of the image."""
        return self.shard.whole_shape(input_shape)


@keras.saving.register_keras_serializable(package="dtk")
class SplitColumns(SplitRows):
    """Gives each rank some of an image's columns."""

    place = 1


@keras.saving.register_keras_serializable(package="dtk")
class GatherColumns(GatherRows):
    """Gives every rank all of an image's columns."""

    place = 1


@keras.saving.register_keras_serializable(package="dtk")
class SpatiallyParallelConv2D(SpatiallyParallel, keras.layers.Conv2D):
    """A `keras.layers.Conv2D` over part of an image, between `SplitRows` and `GatherRows`.

    Takes its arguments and those of `SpatiallyParallel`. All ranks hold the whole kernel.

    Example:
        >>> import dtk, keras
        >>> model = keras.Sequential([
        ...     keras.Input((32, 32, 3)),
        ...     dtk.layers.SplitRows(),
        ...     dtk.layers.SpatiallyParallelConv2D(8, 3, padding="same", activation="relu"),
        ...     dtk.layers.GatherRows(),
        ... ])
        >>> model.output_shape
        (None, 32, 32, 8)
    """

    def windows(self) -> tuple[Window, Window]:
        """See `SpatiallyParallel.windows`."""
        sizes = zip(self.kernel_size, self.strides, self.dilation_rate, strict=True)
        rows, columns = (Window(k, s, d, self.padding) for k, s, d in sizes)
        return rows, columns

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return this rank's part of the output."""
        outputs = self._convolved(inputs, self._copied(self.kernel))
        if self.bias is not None:
            shape = [1, 1, 1, 1]
            shape[1 if self.data_format == "channels_first" else 3] = self.filters
            outputs = outputs + tf.reshape(self._copied(self.bias), shape)
        return outputs if self.activation is None else self.activation(outputs)

    def _convolved(self, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        # All ranks choose the same way, since their graphs must have the same shape.
        plain = self.groups == 1 and self.data_format == "channels_last"
        if plain and fits(self._exchanges, self.windows()):
            return convolve(inputs, kernel, self._exchanges, self.windows())
        return keras.ops.conv(
            self._with_halo(inputs),
            kernel,
            strides=list(self.strides),
            padding="valid",
            dilation_rate=list(self.dilation_rate),
            data_format=self.data_format,
        )


class _Pooling(SpatiallyParallel):
    def windows(self) -> tuple[Window, Window]:
        """See `SpatiallyParallel.windows`."""
        sizes = zip(self.pool_size, self.strides, strict=True)
        rows, columns = (Window(k, s, 1, self.padding) for k, s in sizes)
        return rows, columns


@keras.saving.register_keras_serializable(package="dtk")
class SpatiallyParallelMaxPooling2D(_Pooling, keras.layers.MaxPooling2D):
    """A `keras.layers.MaxPooling2D` over part of an image; see `SpatiallyParallel`."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return this rank's part of the output."""
        return keras.ops.max_pool(
            self._with_halo(inputs, padding=None),
            self.pool_size,
            self.strides,
            "valid",
            self.data_format,
        )


@keras.saving.register_keras_serializable(package="dtk")
class SpatiallyParallelAveragePooling2D(_Pooling, keras.layers.AveragePooling2D):
    """A `keras.layers.AveragePooling2D` over part of an image; see `SpatiallyParallel`."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return this rank's part of the output."""
        sums = keras.ops.average_pool(
            self._with_halo(inputs), self.pool_size, self.strides, "valid", self.data_format
        )
        # Keras does not count padding, but the pooling over the halo does: divide by the real rows.
        for exchange, window, sizes in zip(
            self._exchanges, self.windows(), self._outputs, strict=True
        ):
            mine = ranges_of(sizes)[exchange.communicator.rank]
            length = sum(exchange.halo.sizes)
            counts = np.array([window.taps(i, length) for i in range(mine.start, mine.stop)])
            shape = [1, 1, 1, 1]
            shape[exchange.axis] = -1
            sums = sums * tf.constant((window.kernel / counts).reshape(shape), sums.dtype)
        return sums


@keras.saving.register_keras_serializable(package="dtk")
class SpatiallyParallelUpSampling2D(SpatiallyParallel, keras.layers.UpSampling2D):
    """A `keras.layers.UpSampling2D`, nearest or bilinear, over part of an image.

    Takes its arguments and those of `SpatiallyParallel`. A rank computes the outputs of its own
    rows.
    """

    def _check_arguments(self) -> None:
        """See `SpatiallyParallel._check_arguments`."""
        if self.interpolation not in ("nearest", "bilinear"):
            self._refuse(f"interpolation={self.interpolation!r}", "'nearest' or 'bilinear'")

    def _needed(self, axis: int, inputs: Sequence[int]) -> tuple[tuple[Range, ...], list[int]]:
        """See `SpatiallyParallel._needed`."""
        image = Range(0, sum(inputs))
        # Bilinear interpolation reads the next row on each side, except at the border.
        beside = int(self.interpolation == "bilinear")
        needs = [
            Range(part.start - beside, part.stop + beside).within(image) if part.length else part
            for part in ranges_of(inputs)
        ]
        return tuple(needs), [length * self.size[axis] for length in inputs]

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return this rank's part of the output."""
        outputs = super().call(self._with_halo(inputs))
        index = [slice(None)] * 4
        for exchange, factor, sizes in zip(self._exchanges, self.size, self._outputs, strict=True):
            rank, halo = exchange.communicator.rank, exchange.halo
            start = (ranges_of(halo.sizes)[rank].start - halo.needs[rank].start) * factor
            index[exchange.axis] = slice(start, start + sizes[rank])
        return outputs[tuple(index)]


@keras.saving.register_keras_serializable(package="dtk")
class SpatiallyParallelBatchNormalization(SpatiallyParallel, keras.layers.BatchNormalization):
    """A `keras.layers.BatchNormalization` with the statistics of the whole image.

    Takes its arguments and those of `SpatiallyParallel`. With `synchronized=True` the statistics
    cover all replicas of a strategy, too. Mean and variance are computed one after the other, as
    Keras does on one device.

    Raises:
        ValueError: `renorm`, or an axis other than the channels'.
    """

    def _check_arguments(self) -> None:
        """See `SpatiallyParallel._check_arguments`."""
        if getattr(self, "renorm", False):  # new in Keras 3.14
            self._refuse("renorm=True", "renorm=False")
        self.data_format = "channels_first" if self.axis == 1 else "channels_last"
        if self.axis not in (1, 3, -1):
            self._refuse(f"axis={self.axis}", "the axis of the channels, -1 or 1")

    def _sum(self, values: tf.Tensor) -> tf.Tensor:
        """Return the sum over all parts; its gradient is summed over all parts, too."""
        for group in self._groups:
            if group.size > 1:
                values = copy_to_group(reduce_from_group(values, group), group)
        replica = tf.distribute.get_replica_context() if self.synchronized else None
        if replica is not None:
            values = replica.all_reduce(tf.distribute.ReduceOp.SUM, values)
        return values

    def _mean(self, x: tf.Tensor) -> tf.Tensor:
        axes = [i for i in range(4) if i != self.axis % 4]
        channels = x.shape[self.axis]
        count = tf.cast(tf.size(x, tf.int64) // channels, x.dtype)
        sums = self._sum(tf.concat([tf.reduce_sum(x, axes), count[None]], 0))
        return tf.math.divide_no_nan(sums[:-1], sums[-1])

    def call(
        self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Return this rank's part of the output."""
        if mask is not None:
            self._refuse("a mask", "inputs without one")
        x = tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        mean, variance = (tf.cast(v, x.dtype) for v in (self.moving_mean, self.moving_variance))
        if training and self.trainable:
            shape = [1, 1, 1, 1]
            shape[self.axis] = -1
            mean = self._mean(x)
            variance = self._mean(tf.math.squared_difference(x, tf.reshape(mean, shape)))
            for variable, now in ((self.moving_mean, mean), (self.moving_variance, variance)):
                before = tf.cast(variable, x.dtype)
                variable.assign(before * self.momentum + now * (1.0 - self.momentum))
        outputs = keras.ops.batch_normalization(
            x,
            mean,
            variance,
            self.axis,
            offset=None if self.beta is None else tf.cast(self._copied(self.beta), x.dtype),
            scale=None if self.gamma is None else tf.cast(self._copied(self.gamma), x.dtype),
            epsilon=self.epsilon,
        )
        return tf.cast(outputs, self.compute_dtype)
