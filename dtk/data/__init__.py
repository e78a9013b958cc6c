"""Data: which rows a rank reads, and in which order."""

from dtk.data.empty import empty_dataset
from dtk.data.scatter import scatter_dataset, scatter_index
from dtk.data.seed import set_seed
from dtk.data.shard import shard

__all__ = [
    "empty_dataset",
    "scatter_dataset",
    "scatter_index",
    "set_seed",
    "shard",
]
