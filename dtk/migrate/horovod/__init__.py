"""The names of `horovod.keras` and `horovod.tensorflow` 0.28.1, over a dtk strategy.

    import dtk.migrate.horovod as hvd        # in place of: import horovod.tensorflow.keras as hvd

Nothing else in a script changes. It is started by `dtk run -n 4`, `mpirun` or `srun`.

    script on every rank                        here
    hvd.init()                                  one strategy, whose scope stays entered
    hvd.DistributedOptimizer(optimizer)         the same optimizer, marked
    model.compile, model.fit(own batches)       gradients of all ranks' rows; equal weights
    model.evaluate, model.predict               on this rank's data, without the other ranks
    hvd.callbacks, hvd.allreduce, ...           over the strategy's communicator

As in Horovod, `batch_size` and the data are each rank's own, and a step's batch is all of them
together. The loss is the mean over the rows of all ranks; Horovod averages the ranks' means, which
is the same where every rank has as many rows. What dtk does in another way raises `ReplacedError`,
which says how.
"""

from dtk.migrate.horovod import callbacks, elastic
from dtk.migrate.horovod.collectives import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    global_process_set,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
    remove_process_set,
)
from dtk.migrate.horovod.gradient_tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from dtk.migrate.horovod.job import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    gpu_available,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    rocm_built,
    shutdown,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)
from dtk.migrate.horovod.optimizer import (
    Compression,
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)
from dtk.migrate.horovod.replaced import replaced

SyncBatchNormalization = replaced(
    "SyncBatchNormalization",
    "write keras.layers.BatchNormalization(synchronized=True), whose statistics fit computes over "
    "all ranks",
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> object:
    raise AttributeError(
        f"hvd.{name} is not in dtk.migrate.horovod: see 'From Horovod, in dtk's own names' in "
        "docs/migrating.md"
    )
