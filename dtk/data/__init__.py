"""Data: which rows each rank reads, and in which order."""

from dtk.data.describe import Description, describe
from dtk.data.empty import empty_dataset
from dtk.data.iterators import broadcast_iterator, synchronized_iterator
from dtk.data.minibatches import Minibatch, PartitionedMinibatches
from dtk.data.scatter import scatter_dataset, scatter_index
from dtk.data.seed import set_seed
from dtk.data.shard import shard

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
