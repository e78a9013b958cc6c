"""Data: which rows each rank reads, and in which order."""

from dtk.data.describe import Description, describe
from dtk.data.minibatches import Minibatch, PartitionedMinibatches
from dtk.data.rank_shards import shard
from dtk.data.rows import empty_dataset
from dtk.data.scatter import scatter_dataset, scatter_index
from dtk.data.sharing import broadcast_iterator, set_seed, synchronized_iterator

__all__ = [
    "Description",
    "Minibatch",
    "PartitionedMinibatches",
    "broadcast_iterator",
    "describe",
    "empty_dataset",
    "scatter_dataset",
    "scatter_index",
    "set_seed",
    "shard",
    "synchronized_iterator",
]
