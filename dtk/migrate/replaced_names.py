"""Names of `tf.distribute`, and what dtk does about each; imports no TensorFlow."""

from __future__ import annotations

from types import ModuleType

# Values of TensorFlow's that dtk's strategies, which are `tf.distribute.Strategy`s, work with.
KEPT = frozenset(
    {
        *("CrossDeviceOps", "HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice"),
        *("DistributedDataset", "DistributedIterator", "DistributedValues", "InputContext"),
        *("InputOptions", "InputReplicationMode", "ReduceOp", "ReplicaContext", "RunOptions"),
        *("Strategy", "StrategyExtended", "coordinator", "get_replica_context", "get_strategy"),
        *("has_strategy", "in_cross_replica_context", "cluster_resolver.ClusterResolver"),
        *("experimental.CollectiveCommunication", "experimental.CollectiveHints"),
        *("experimental.CommunicationImplementation", "experimental.CommunicationOptions"),
        *("experimental.ValueContext", "experimental.coordinator", "experimental.partitioners"),
    }
)
# Functions and classes that dtk.migrate.tf_distribute has, with TensorFlow's arguments.
OWN = frozenset(
    {
        *("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy"),
        *("cluster_resolver.SlurmClusterResolver", "cluster_resolver.TFConfigClusterResolver"),
    }
)
_CHECKPOINT = "dtk.callbacks.Checkpoint saves on SIGTERM; `dtk run --max-restarts` starts again"
_LAUNCHER = "the launcher tells who takes part (`dtk run`, mpirun, srun, TF_CONFIG)"
# name: what to do in its place.
REPLACED = {
    "OneDeviceStrategy": "dtk.auto_strategy() in one process is plain Keras on its device",
    "Server": "delete it: ParameterServerStrategy() serves, in workers and servers",
    "TPUStrategy": "dtk has no TPUs; keep TensorFlow's",
    "experimental_set_strategy": "write `with strategy.scope():`",
    "cluster_resolver.GCEClusterResolver": _LAUNCHER,
    "cluster_resolver.KubernetesClusterResolver": _LAUNCHER,
    "cluster_resolver.KubernetesExecutableLocation": _LAUNCHER,
    "cluster_resolver.SimpleClusterResolver": _LAUNCHER,
    "cluster_resolver.TPUClusterResolver": "dtk has no TPUs; keep TensorFlow's",
    "cluster_resolver.UnionResolver": _LAUNCHER,
    "experimental.auto_strategy": "call `dtk.auto_strategy()`",
    "experimental.CentralStorageStrategy": "write MirroredStrategy(), or a ParameterServerStrategy",
    "experimental.PreemptionCheckpointHandler": _CHECKPOINT,
    "experimental.PreemptionWatcher": _CHECKPOINT,
    "experimental.TPUStrategy": "dtk has no TPUs; keep TensorFlow's",
    "experimental.TerminationConfig": _CHECKPOINT,
    "experimental.rpc": "`strategy.communicator` sends values between ranks",
}


def kept(name: str, module: ModuleType, prefix: str = "") -> object:
    """Return TensorFlow's value of a name that stays, or raise with what replaces it."""
    full = f"{prefix}{name}"
    if full in KEPT:
        return getattr(module, name)
    cure = REPLACED.get(full, "tf.distribute has no such name either")
    raise AttributeError(f"dtk.migrate.tf_distribute has no {full!r}: {cure}")
