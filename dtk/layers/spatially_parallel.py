"""Keras's layers over images; each rank computes part of the rows or columns, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from dtk.layers import halo_convolution
from dtk.layers.regions import copy_to_group, reduce_from_group
from dtk.layers.row_ranges import Range, Window, ranges_of
from dtk.layers.spatial import SpatiallyParallel


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
        outputs = self._convolved(inputs, self.copied(self.kernel))
        if self.bias is not None:
            shape = [1, 1, 1, 1]
            shape[1 if self.data_format == "channels_first" else 3] = self.filters
            outputs = outputs + tf.reshape(self.copied(self.bias), shape)
        return outputs if self.activation is None else self.activation(outputs)

    def _convolved(self, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        # All ranks choose the same way, since their graphs must have the same shape.
        plain = self.groups == 1 and self.data_format == "channels_last"
        if plain and halo_convolution.fits(self._exchanges, self.windows()):
            return halo_convolution.convolve(inputs, kernel, self._exchanges, self.windows())
        return keras.ops.conv(
            self.with_halo(inputs),
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
            self.with_halo(inputs, padding=None),
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
            self.with_halo(inputs), self.pool_size, self.strides, "valid", self.data_format
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

    def check_arguments(self) -> None:
        """See `SpatiallyParallel.check_arguments`."""
        if self.interpolation not in ("nearest", "bilinear"):
            self.refuse(f"interpolation={self.interpolation!r}", "'nearest' or 'bilinear'")

    def needed(self, axis: int, inputs: Sequence[int]) -> tuple[tuple[Range, ...], list[int]]:
        """See `SpatiallyParallel.needed`."""
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
        outputs = super().call(self.with_halo(inputs))
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

    def check_arguments(self) -> None:
        """See `SpatiallyParallel.check_arguments`."""
        if getattr(self, "renorm", False):  # new in Keras 3.14
            self.refuse("renorm=True", "renorm=False")
        self.data_format = "channels_first" if self.axis == 1 else "channels_last"
        if self.axis not in (1, 3, -1):
            self.refuse(f"axis={self.axis}", "the axis of the channels, -1 or 1")

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
            self.refuse("a mask", "inputs without one")
        x = tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        mean, variance = (tf.cast(v, x.dtype) for v in (self.moving_mean, self.moving_variance))
        if training and self.trainable:
            shape = [1, 1, 1, 1]
            shape[self.axis] = -1
            old = mean, variance
            mean = self._mean(x)
            variance = self._mean(tf.math.squared_difference(x, tf.reshape(mean, shape)))
            for variable, before, now in zip(
                (self.moving_mean, self.moving_variance), old, (mean, variance), strict=True
            ):
                variable.assign(before * self.momentum + now * (1.0 - self.momentum))
        outputs = keras.ops.batch_normalization(
            x,
            mean,
            variance,
            self.axis,
            offset=None if self.beta is None else tf.cast(self.copied(self.beta), x.dtype),
            scale=None if self.gamma is None else tf.cast(self.copied(self.gamma), x.dtype),
            epsilon=self.epsilon,
        )
        return tf.cast(outputs, self.compute_dtype)
