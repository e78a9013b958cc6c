"""Horovod's elastic training, which dtk does by restarting: all of its names raise."""

from dtk.migrate.horovod.replaced import replaced

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "TensorFlowState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

_RESUME = (
    'give fit dtk.callbacks.Checkpoint("checkpoints", resume=True) and start the script by '
    "`dtk run --max-restarts 3`; any number of ranks goes on from the newest checkpoint"
)
CommitStateCallback = replaced("elastic.CommitStateCallback", _RESUME)
KerasState = replaced("elastic.KerasState", _RESUME)
TensorFlowKerasState = replaced("elastic.TensorFlowKerasState", _RESUME)
TensorFlowState = replaced("elastic.TensorFlowState", _RESUME)
UpdateBatchStateCallback = replaced("elastic.UpdateBatchStateCallback", _RESUME)
UpdateEpochStateCallback = replaced("elastic.UpdateEpochStateCallback", _RESUME)
run = replaced("elastic.run", _RESUME)
