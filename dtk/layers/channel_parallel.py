"""Layers with channels divided among the ranks of a group; results equal those of one device.

    split="output"     each rank has some of the filters     x -> copy, compute, gather channels
    split="input"      each rank has some of the inputs      x -> slice, compute, add up

An "output" layer and then an "input" layer need one all-reduce each way, after Shoeybi et al.
(Megatron-LM, arXiv:1909.08053): the second takes the part of the channels that the first computes.

    hidden = ChannelParallelDense(4096, "gelu", gather_output=False)(x)
    y = ChannelParallelDense(1024, split="input", input_is_split=True)(hidden)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.shard import Shard
from dtk.compat.keras_variables import set_shard
from dtk.errors import at_rank
from dtk.layers.regions import (
    agreed_lengths,
    copy_to_group,
    gather_from_group,
    model_group,
    reduce_from_group,
    scatter_to_group,
)
from dtk.nests import Config, Function

# For these activations a channel's output depends on no other channel.
# fmt: off
_ELEMENTWISE = frozenset(
    {
        "celu", "elu", "exponential", "gelu", "hard_shrink", "hard_sigmoid", "hard_silu",
        "hard_tanh", "leaky_relu", "linear", "log_sigmoid", "mish", "relu", "relu6", "selu",
        "sigmoid", "silu", "soft_shrink", "softplus", "softsign", "sparse_plus",
        "sparse_sigmoid", "squareplus", "tanh", "tanh_shrink", "threshold"
    }
)
# fmt: on

_Shape: TypeAlias = Sequence[int | None]
# Take the variable's shape and dtype, and the variable's value.
_Initializer: TypeAlias = Function[tf.Tensor]
_OfValue: TypeAlias = Callable[[tf.Tensor], tf.Tensor]

# Sums over elements: the penalty of the whole is the sum of the penalties of its parts.
_ADDITIVE = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
# Norms along axes that the constraint names.
_NORMS = (keras.constraints.MaxNorm, keras.constraints.MinMaxNorm, keras.constraints.UnitNorm)


class ChannelParallel(keras.layers.Layer):
    """Base of layers with divided channels; list it before the Keras layer among the base classes.

    Args:
        args: Arguments of the Keras layer.
        split: "output", each rank has some of the filters; or "input", some of the input channels.
        communicator: Communicator of the ranks that share the layer. None:
            `model_communicator` of the strategy in whose scope the layer is built; without one the
            layer is not divided. It is not part of the configuration: a layer made from a
            configuration uses the strategy's.
        gather_output: Whether every rank gets all channels. False, with "output" only, leaves each
            rank with the channels that it computes.
        input_is_split: Whether the input has this rank's channels only, with "input" only.
        kwargs: Arguments of the Keras layer.

    Raises:
        ValueError: Arguments contradict each other, or do not work in parts.
    """

    communicates = True

    def __init__(
        self,
        *args: object,
        split: str = "output",
        communicator: Communicator | None = None,
        gather_output: bool = True,
        input_is_split: bool = False,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.split = split
        self.gather_output = gather_output
        self.input_is_split = input_is_split
        self.supports_jit = False  # XLA cannot compile communication
        self._communicator = communicator
        self._channels: Shard | None = None
        self._check_arguments()

    @property
    def group(self) -> Communicator:
        """The ranks that share the layer, once it is built."""
        return self._divided.communicator

    @property
    def _divided(self) -> Shard:
        if self._channels is None:
            raise ValueError(f"layer {self.name!r} is not built yet; call it, or its `build`")
        return self._channels

    @property
    def _channel_axis(self) -> int:
        return 1 if getattr(self, "data_format", "channels_last") == "channels_first" else -1

    def _check_arguments(self) -> None:
        if self.split not in ("output", "input"):
            self._refuse(f"split={self.split!r}", "'output' or 'input'")
        if self.split == "input" and not self.gather_output:
            self._refuse("gather_output=False with split='input'", "split='output' for it")
        if self.split == "output" and self.input_is_split:
            self._refuse("input_is_split=True with split='output'", "split='input' for it")
        if getattr(self, "groups", 1) != 1:
            self._refuse(f"groups={self.groups}", "groups=1")
        if getattr(self, "lora_rank", None) or getattr(self, "quantization_config", None):
            self._refuse("lora_rank or quantization_config", "a layer without them")
        if self.gather_output:
            return
        if not is_elementwise(self.activation):
            name = getattr(self.activation, "__name__", repr(self.activation))
            self._refuse(
                f"activation={name!r} with gather_output=False, where it sees part of the channels",
                "one of Keras's that works on each element, or gather_output=True",
            )
        if self.activity_regularizer is not None:
            self._refuse("activity_regularizer with gather_output=False", "gather_output=True")

    def _refuse(self, setting: str, expected: str) -> None:
        raise ValueError(f"layer {self.name!r}: {setting}; use {expected}")

    def enable_lora(self, *args: object, **kwargs: object) -> None:
        """Raise: a divided layer has no LoRA."""
        del args, kwargs
        self._refuse("enable_lora", "it before the layer is divided, or a layer that is not")

    # Variables.

    def build(self, input_shape: _Shape) -> None:
        """Make this rank's variables; every rank of the group must build the same layers."""
        group = model_group(self._communicator)
        axis = self._channel_axis
        channels = input_shape[axis]
        if channels is None:
            raise ValueError(f"layer {self.name!r}: the number of input channels must be known")
        if self.split == "output":
            whole = self.units if hasattr(self, "units") else self.filters
            self._channels = Shard.evenly(whole, self._input_axis + 1, group)
        elif self.input_is_split:
            self._channels = Shard(self._input_axis, agreed_lengths(channels, group), group)
            input_shape = list(input_shape)
            input_shape[axis] = self._channels.length
        else:
            self._channels = Shard.evenly(channels, self._input_axis, group)
        if not min(self._channels.sizes):
            message = (
                f"layer {self.name!r} divides {self._channels.length} {self.split} channels among "
                f"{group.size} ranks; it takes one or more for each"
            )
            raise ValueError(at_rank(group.rank, message))
        super().build(tuple(input_shape))
        channel_axis = axis % len(input_shape)
        self.input_spec = keras.InputSpec(
            min_ndim=len(getattr(self, "kernel_size", ())) + 2,
            axes={channel_axis - len(input_shape): channels},
        )

    @property
    def _input_axis(self) -> int:
        """Axis of the input channels in a kernel; the next axis has the output channels."""
        return len(self.kernel_size) if hasattr(self, "kernel_size") else 0

    def add_weight(
        self, *args: object, shape: Sequence[int] = (), name: str | None = None, **kwargs: object
    ) -> keras.Variable:
        """Add this rank's part of a weight of the Keras layer."""
        divided = self._divided
        group = divided.communicator
        initializer = keras.initializers.get(kwargs.pop("initializer", None) or "zeros")
        if name == "bias" and self.split == "output":
            shard = Shard(0, divided.sizes, group)
        elif name == "kernel":
            shard = divided
        else:  # every rank holds the whole, with the same values
            return super().add_weight(
                *args,
                shape=shape,
                name=name,
                initializer=lambda shape, dtype=None: _initial(initializer, group, shape, dtype),
                **kwargs,
            )
        regularizer = keras.regularizers.get(kwargs.pop("regularizer", None))
        constraint = keras.constraints.get(kwargs.pop("constraint", None))
        variable = super().add_weight(
            *args,
            shape=shard.part_shape(shape),
            name=name,
            initializer=lambda _, dtype=None: shard.part(
                _initial(initializer, group, shape, dtype)
            ),
            regularizer=_part_regularizer(regularizer, shard),
            constraint=_part_constraint(constraint, shard),
            **kwargs,
        )
        set_shard(variable, shard)
        return variable

    # Computing.

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Compute this rank's part, and combine the parts of the group."""
        divided, group = self._divided, self.group
        if self.split == "output":
            outputs = self._with_bias(self._linear(copy_to_group(inputs, group)))
            if self.gather_output:
                outputs = gather_from_group(outputs, self._along_channels(divided, outputs))
        else:
            if not self.input_is_split:
                inputs = scatter_to_group(inputs, self._along_channels(divided, inputs))
            outputs = self._with_bias(reduce_from_group(self._linear(inputs), group))
        return outputs if self.activation is None else self.activation(outputs)

    def _along_channels(self, divided: Shard, tensor: tf.Tensor) -> Shard:
        axis = self._channel_axis % len(tensor.shape)
        return Shard(axis, divided.sizes, divided.communicator)

    def _linear(self, inputs: tf.Tensor) -> tf.Tensor:
        if not hasattr(self, "kernel_size"):
            return keras.ops.matmul(inputs, self.kernel)
        padding = self.padding
        if padding == "causal":
            before = [[0, 0], [0, 0], [0, 0]]
            steps = 3 - self._channel_axis % 3  # the axis that holds no channels
            before[steps] = [self.dilation_rate[0] * (self.kernel_size[0] - 1), 0]
            inputs, padding = keras.ops.pad(inputs, before), "valid"
        return keras.ops.conv(
            inputs,
            self.kernel,
            strides=list(self.strides),
            padding=padding,
            dilation_rate=list(self.dilation_rate),
            data_format=self.data_format,
        )

    def _with_bias(self, outputs: tf.Tensor) -> tf.Tensor:
        if self.bias is None:
            return outputs
        shape = [1] * len(outputs.shape)
        shape[self._channel_axis] = -1
        return outputs + keras.ops.reshape(self.bias, shape)

    def compute_output_shape(self, input_shape: _Shape) -> tuple[int | None, ...]:
        """Return the shape of the outputs of `call`."""
        shape = list(super().compute_output_shape(input_shape))
        if not self.gather_output and self._channels is not None:
            shape[self._channel_axis] = self._channels.size
        return tuple(shape)

    def get_config(self) -> Config:
        """Return the configuration of the Keras layer, and how the layer is divided."""
        own = {name: getattr(self, name) for name in ("split", "gather_output", "input_is_split")}
        return {**super().get_config(), **own}


# A variable in parts, one on every rank, is initialized, penalized and constrained as one whole
# variable, so that a layer in parts equals the layer of one device.


def _initial(
    initializer: _Initializer, communicator: Communicator, shape: Sequence[int], dtype: str | None
) -> tf.Tensor:
    """Draw a whole variable; ranks that drew different numbers would hold different variables."""
    return communicator.broadcast(tf.convert_to_tensor(initializer(shape, dtype=dtype)), 0)


def _part_regularizer(regularizer: _OfValue | None, shard: Shard) -> _OfValue | None:
    """Return a regularizer that takes a part and returns the penalty of the whole, on every rank.

    The penalty counts once over the group: its gradient on a rank is the gradient of this rank's
    part. Sums over elements (L1, L2) send one number; any other regularizer gathers the variable.
    """
    if regularizer is None:
        return None
    if type(regularizer) in _ADDITIVE:
        return lambda part: reduce_from_group(regularizer(part), shard.communicator)
    return lambda part: regularizer(gather_from_group(tf.convert_to_tensor(part), shard))


def _part_constraint(constraint: _OfValue | None, shard: Shard) -> _OfValue | None:
    """Return a constraint on a part with the effect of the constraint on the whole.

    A constraint on each element, or on norms along other axes than the divided one, sends nothing;
    any other gathers the variable after each update.
    """
    if constraint is None or type(constraint) is keras.constraints.NonNeg:
        return constraint
    if type(constraint) in _NORMS:
        axis = getattr(constraint, "axis", 0)
        axes = [axis] if isinstance(axis, int) else list(axis)
        if shard.axis not in axes and min(axes) >= 0:
            return constraint
    return lambda part: shard.part(constraint(shard.whole(tf.convert_to_tensor(part))))


def is_elementwise(activation: Function[tf.Tensor] | None) -> bool:
    """Return whether an activation is a Keras function that works on each element by itself."""
    name = getattr(activation, "__name__", "")
    return name in _ELEMENTWISE and getattr(keras.activations, name, None) == activation


@keras.saving.register_keras_serializable(package="dtk")
class ChannelParallelDense(ChannelParallel, keras.layers.Dense):
    """A `keras.layers.Dense` in parts, with its arguments and those of `ChannelParallel`.

    Example:
        >>> import dtk, numpy as np
        >>> layer = dtk.layers.ChannelParallelDense(3, split="input")
        >>> layer(np.ones((2, 4))).shape
        TensorShape([2, 3])
    """


@keras.saving.register_keras_serializable(package="dtk")
class NodeParallelDense(ChannelParallelDense):
    """A `keras.layers.Dense` in parts: every rank computes some of the nodes.

    This is a `ChannelParallelDense` with split="output", under the name used for dividing neurons.
    """

    def _check_arguments(self) -> None:
        if self.split != "output":
            self._refuse(f"split={self.split!r}", "ChannelParallelDense: nodes are outputs")
        super()._check_arguments()


@keras.saving.register_keras_serializable(package="dtk")
class ChannelParallelConv1D(ChannelParallel, keras.layers.Conv1D):
    """A `keras.layers.Conv1D` in parts, with its arguments and those of `ChannelParallel`."""


@keras.saving.register_keras_serializable(package="dtk")
class ChannelParallelConv2D(ChannelParallel, keras.layers.Conv2D):
    """A `keras.layers.Conv2D` in parts, with its arguments and those of `ChannelParallel`."""


@keras.saving.register_keras_serializable(package="dtk")
class ChannelParallelConv3D(ChannelParallel, keras.layers.Conv3D):
    """A `keras.layers.Conv3D` in parts, with its arguments and those of `ChannelParallel`."""
