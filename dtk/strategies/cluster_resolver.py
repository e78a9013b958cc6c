"""This process's job and task, in the terms of TensorFlow's cluster resolvers.

| started with | task_type, task_id | cluster_spec() |
|---|---|---|
| plain `python`, or a strategy over this process alone | None, None | empty |
| TF_CONFIG; `dtk run` over collectives, which sets it | as it says | as it says |
| `srun`, TensorFlow's collectives | "worker", rank | addresses derived from the job |
| `mpirun`, `srun` over Horovod, `dtk run --communicator horovod` | "worker", rank | host names |
| parameter servers | "chief", 0 (or "evaluator", 0) | chief, workers, servers |

For plain `python` the result is that of TensorFlow's own `TFConfigClusterResolver` without
TF_CONFIG. MPI and Horovod open ports as they need them, so addresses are not known in advance: a
task is then the name of its host without a port. The evaluator is left out of `cluster_spec()`: it
works beside the cluster and has no rank in it.
"""

from __future__ import annotations

import re

import tensorflow as tf

from dtk.communicators.base import Communicator

# "host:port"; an IPv6 host has brackets.
_ADDRESS = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+):[0-9]+")


class JobResolver(tf.distribute.cluster_resolver.SimpleClusterResolver):
    """A `tf.distribute.cluster_resolver.ClusterResolver` for the launcher's job.

    Strategies make it: `strategy.cluster_resolver`.

    Example:
        >>> import tensorflow as tf
        >>> spec = tf.train.ClusterSpec({"worker": ["node1", "node2"]})
        >>> resolver = JobResolver(spec, task_type="worker", task_id=1)
        >>> resolver.task_id, resolver.cluster_spec().as_dict()
        (1, {'worker': ['node1', 'node2']})
    """


def resolve(communicator: Communicator) -> JobResolver:
    """Describe the job of a communicator's ranks."""
    place, rank, size = communicator.place, communicator.rank, communicator.size
    if size == 1 and (place is None or place.kind == "single"):
        return JobResolver(tf.train.ClusterSpec({}))
    roles = (place.roles if place is not None else ()) or ("worker",) * size
    addresses = _addresses(communicator)
    cluster = {
        role: [address for address, its in zip(addresses, roles, strict=True) if its == role]
        for role in dict.fromkeys(roles)
    }
    return JobResolver(
        tf.train.ClusterSpec(cluster),
        task_type=roles[rank],
        task_id=roles[:rank].count(roles[rank]),
        rpc_layer="grpc" if all(map(_has_port, addresses)) else None,
    )


def _addresses(communicator: Communicator) -> tuple[str, ...]:
    """Return an address for each rank, or its host's name; "" if both are unknown."""
    place = communicator.place
    # Where ranks have met, only TensorFlow's collectives listen at these addresses.
    if place is not None and (place.roles or communicator.name == "collective"):
        return place.addresses
    return communicator.hosts or ("",) * communicator.size


def _has_port(address: str) -> bool:
    return _ADDRESS.fullmatch(address) is not None
