"""The base of layers that see part of an image's rows or columns, and the layers at the borders.

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
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.local import LocalCommunicator
from dtk.communicators.shard import Shard
from dtk.errors import at_rank
from dtk.even_division import even_sizes
from dtk.layers.group import agreed_lengths, model_group
from dtk.layers.halo import HaloExchange
from dtk.layers.regions import copy_to_group, gather_from_group, scatter_to_group
from dtk.layers.row_ranges import Halo, Range, Window, ranges_of
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
        self,
        *args: object,
        split: str = "rows",
        communicator: Groups = None,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.split = split
        self.supports_jit = False  # XLA cannot compile communication
        self._given = communicator
        self._groups: tuple[Communicator, ...] = ()
        self._exchanges: tuple[HaloExchange, ...] = ()
        self._outputs: tuple[tuple[int, ...], ...] = ()
        if split not in ("rows", "columns", "both"):
            self.refuse(f"split={split!r}", "'rows', 'columns' or 'both'")
        if (split == "both") != isinstance(communicator, tuple):
            self.refuse(
                f"split={split!r} with communicator={communicator!r}",
                "a pair of communicators for 'both', and one for 'rows' or 'columns'",
            )
        if self.activity_regularizer is not None:
            self.refuse("activity_regularizer", "it on a layer behind GatherRows")
        self.check_arguments()

    def check_arguments(self) -> None:
        """Raise a ValueError for arguments that do not work in parts."""

    def refuse(self, given: str, expected: str) -> NoReturn:
        """Raise a ValueError that names the layer.

        Args:
            given: The argument that the layer refuses.
            expected: The argument to use instead.
        """
        raise ValueError(f"layer {self.name!r}: {given}; use {expected}")

    @property
    def image_axes(self) -> tuple[int, int]:
        """The axes of rows and of columns."""
        first = getattr(self, "data_format", "channels_last") == "channels_first"
        return (2, 3) if first else (1, 2)

    def windows(self) -> tuple[Window, Window] | None:
        """Return the windows over rows and columns; None if outputs need no other rank's rows."""
        return None

    def needed(self, axis: int, inputs: Sequence[int]) -> tuple[tuple[Range, ...], list[int]]:
        """Return the range of an axis that every rank needs, and the length that it computes.

        Args:
            axis: 0 for rows, 1 for columns.
            inputs: Length of every rank's part.
        """
        windows = self.windows()
        if windows is None:
            return tuple(ranges_of(inputs)), list(inputs)
        window, length = windows[axis], sum(inputs)
        outputs = even_sizes(window.outputs(length), len(inputs))
        if not min(outputs):
            raise ValueError(
                at_rank(
                    self._groups[axis].rank,
                    f"layer {self.name!r} makes {sum(outputs)} {('rows', 'columns')[axis]} of "
                    f"{length}, for {len(inputs)} ranks; gather the image in front of it "
                    "(GatherRows), or use fewer ranks",
                )
            )
        needs = [window.needs(part, length) for part in ranges_of(outputs)]
        return tuple(needs), outputs

    def build(self, input_shape: Shape) -> None:
        """Agree with the other ranks on which rank has which rows, and make the variables."""
        self._groups = groups_of(self.split, self._given)
        whole = list(input_shape)
        exchanges, parts = [], []
        for axis, (place, group) in enumerate(zip(self.image_axes, self._groups, strict=True)):
            length = input_shape[place]
            inputs = agreed_lengths(self._known(length, input_shape), group)
            whole[place] = sum(inputs)
            needs, outputs = self.needed(axis, inputs)
            exchanges.append(HaloExchange(place, Halo(inputs, needs), group))
            parts.append(tuple(outputs))
        super().build(tuple(whole))
        self._exchanges, self._outputs = tuple(exchanges), tuple(parts)

    def _known(self, length: int | None, shape: Shape) -> int:
        if length is None:
            self.refuse(
                f"an image of unknown size, shape {tuple(shape)}",
                "an Input whose rows and columns are given",
            )
        return length

    def with_halo(self, inputs: tf.Tensor, padding: float | None = 0.0) -> tf.Tensor:
        """Return this rank's rows and columns with padding and the ones it needs of other ranks.

        Args:
            inputs: This rank's part.
            padding: See `HaloExchange`.
        """
        for exchange in self._exchanges:
            inputs = exchange(inputs, padding)
        return inputs

    def copied(self, weight: tf.Tensor | keras.Variable) -> tf.Tensor:
        """Return a weight; its gradient is summed over all parts of the image.

        Args:
            weight: A weight that is equal on all ranks.
        """
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
        config: Config = super().get_config()
        config["split"] = self.split
        return config


def groups_of(split: str, given: Groups) -> tuple[Communicator, Communicator]:
    """Return the ranks that divide rows, and the ranks that divide columns."""
    if isinstance(given, tuple):
        return given
    group, alone = model_group(given), LocalCommunicator()
    return (group, alone) if split == "rows" else (alone, group)


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
        length = input_shape[axis]
        if length is None:
            raise ValueError(
                f"layer {self.name!r}: an image of unknown size, shape {tuple(input_shape)}; use "
                "an Input whose rows and columns are given"
            )
        self._shard = self.divide(length, axis, model_group(self._given))
        super().build(input_shape)

    def divide(self, length: int, axis: int, group: Communicator) -> Shard:
        """Return how the image is divided.

        Args:
            length: Length of the input along the axis.
            axis: The axis that is divided.
            group: Communicator of the ranks.
        """
        raise NotImplementedError

    def get_config(self) -> Config:
        """Return the configuration, without the communicator."""
        config: Config = super().get_config()
        config["data_format"] = self.data_format
        return config


@keras.saving.register_keras_serializable(package="dtk")
class SplitRows(Border):
    """Gives each rank some of an image's rows: as even as possible, the first ranks one more."""

    def divide(self, length: int, axis: int, group: Communicator) -> Shard:
        """See `Border.divide`."""
        return Shard.evenly(length, axis, group)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return this rank's part."""
        return scatter_to_group(inputs, self.shard)

    def compute_output_shape(self, input_shape: Shape) -> tuple[int | None, ...]:
        """Return the shape of this rank's part."""
        return self.shard.part_shape(input_shape)


@keras.saving.register_keras_serializable(package="dtk")
class GatherRows(Border):
    """Gives every rank all of an image's rows, however many each has."""

    def divide(self, length: int, axis: int, group: Communicator) -> Shard:
        """See `Border.divide`."""
        return Shard(axis, agreed_lengths(length, group), group)

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
