"""The plain Keras layers of one device for layers in parts."""

from __future__ import annotations

import keras

from dtk.layers import channel_parallel, spatial
from dtk.layers.parallelize import BY_CHANNELS, BY_IMAGE
from dtk.nests import Config

_KERAS = {made: layer for layer, made in (*BY_CHANNELS.items(), *BY_IMAGE.items())}
_KERAS[channel_parallel.NodeParallelDense] = keras.layers.Dense
_BORDERS = (spatial.SplitRows, spatial.SplitColumns, spatial.GatherRows, spatial.GatherColumns)
# Arguments of a layer in parts that the Keras layer does not have.
_OWN = ("split", "gather_output", "input_is_split")


def is_in_parts(layer: keras.Layer) -> bool:
    """Return whether a layer computes a part only."""
    return isinstance(layer, _BORDERS) or type(layer) in _KERAS


def plain_layer(layer: keras.Layer) -> keras.Layer:
    """Make the layer of one device for a layer in parts."""
    if isinstance(layer, _BORDERS):
        return keras.layers.Identity(name=layer.name)
    config: Config = layer.get_config()
    made = _KERAS.get(type(layer))
    if made is None:
        return type(layer).from_config(config)
    return made.from_config({k: v for k, v in config.items() if k not in _OWN})
