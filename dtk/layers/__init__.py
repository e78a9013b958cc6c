"""Model parallelism: every rank of a group computes a part of a layer, exactly.

Importing this package registers its layers with Keras: import it before `keras.saving.load_model`
reads a model with such layers.
"""

from dtk.compat.keras_variables import shard_of
from dtk.layers import collectives, regions
from dtk.layers.channel_parallel import (
    ChannelParallelConv1D,
    ChannelParallelConv2D,
    ChannelParallelConv3D,
    ChannelParallelDense,
    NodeParallelDense,
)
from dtk.layers.parallelize import parallelize, whole
from dtk.layers.pipeline import Pipeline
from dtk.layers.regions import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    scatter_to_group,
)
from dtk.layers.spatial import (
    GatherColumns,
    GatherRows,
    SpatiallyParallelAveragePooling2D,
    SpatiallyParallelBatchNormalization,
    SpatiallyParallelConv2D,
    SpatiallyParallelMaxPooling2D,
    SpatiallyParallelUpSampling2D,
    SplitColumns,
    SplitRows,
)
from dtk.layers.sync_batch_norm import convert_sync_batchnorm
from dtk.trainer.replica.whole_batch import gather_over_batch, sum_over_batch

__all__ = [
    "ChannelParallelConv1D",
    "ChannelParallelConv2D",
    "ChannelParallelConv3D",
    "ChannelParallelDense",
    "GatherColumns",
    "GatherRows",
    "NodeParallelDense",
    "Pipeline",
    "SpatiallyParallelAveragePooling2D",
    "SpatiallyParallelBatchNormalization",
    "SpatiallyParallelConv2D",
    "SpatiallyParallelMaxPooling2D",
    "SpatiallyParallelUpSampling2D",
    "SplitColumns",
    "SplitRows",
    "collectives",
    "convert_sync_batchnorm",
    "copy_to_group",
    "gather_from_group",
    "gather_over_batch",
    "parallelize",
    "reduce_from_group",
    "regions",
    "scatter_to_group",
    "shard_of",
    "sum_over_batch",
    "whole",
]
