"""Horovod's optimizers: the script's own, marked to be distributed when a model is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from dtk.compat import keras_optimizers, tf_replicas
from dtk.compat.made_classes import make_subclass
from dtk.errors import ReplacedError
from dtk.migrate.horovod import job
from dtk.migrate.horovod.collectives import (
    Average,
    Compression,
    ReduceOp,
    Sum,
    check_compression,
    check_op,
    global_process_set,
)
from dtk.migrate.horovod.replaced import replaced
from dtk.nests import Gradients, Tree
from dtk.trainer.distributed_model import trainer_of

__all__ = ["Compression", "DistributedOptimizer", "PartialDistributedOptimizer", "load_model"]


def DistributedOptimizer(  # noqa: N802
    optimizer: keras.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: str = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[object] | None = None,
    process_set: object = global_process_set,
    scale_local_gradients: bool = True,
) -> keras.Optimizer:
    """Let an optimizer apply the gradients of all ranks, in models compiled with it.

    Arguments that say how Horovod moves gradients, not what the optimizer gets, change nothing
    here, and rank 0 prints so: name, device_dense, device_sparse, sparse_as_dense,
    gradient_predivide_factor, num_groups and groups.

    Args:
        optimizer: A Keras optimizer; it is changed, and returned.
        name: Names Horovod's messages.
        device_dense: Places Horovod's messages.
        device_sparse: Places Horovod's messages.
        compression: What gradients are sent as.
        sparse_as_dense: How sparse gradients are sent; their sum is the same.
        gradient_predivide_factor: Divides before and after the sum; the mean is the same.
        op: Average: the optimizer gets the gradient of the mean over all ranks' rows; Sum: `size`
            times that.
        backward_passes_per_step: The number of batches whose gradients each rank adds up before
            they are exchanged and applied: Keras's `gradient_accumulation_steps`. The optimizer
            then counts windows; Horovod's counted batches, which bias correction such as Adam's
            depends on.
        average_aggregated_gradients: Whether the optimizer gets the mean of these batches, not the
            sum.
        num_groups: Groups Horovod's messages.
        groups: Groups Horovod's messages.
        process_set: Must be `global_process_set`.
        scale_local_gradients: Of variables that each rank trains alone, which do not exist here.

    Returns:
        The optimizer.

    Raises:
        ReplacedError: The op, compression or process set is one that dtk does in another way.
        ValueError: Horovod is not initialized, the optimizer is distributed already, or it has
            state and cannot begin to accumulate.
        TypeError: It is not an optimizer of Keras 3.

    Example:
        >>> import dtk.migrate.horovod as hvd, keras
        >>> hvd.init()
        >>> hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size())).name
        'SGD'
        >>> hvd.shutdown()
    """
    del scale_local_gradients
    strategy, passes = job.strategy(), backward_passes_per_step
    if not isinstance(optimizer, keras.Optimizer):
        raise TypeError(f"DistributedOptimizer got {optimizer!r}; expected a keras.Optimizer")
    if check_op(op) not in (Average, Sum):
        raise ValueError("op currently only supports Average and Sum")
    if process_set is not global_process_set:
        raise ReplacedError(
            "process_set: a model is trained by all ranks of its strategy; start one job for each "
            "group of ranks"
        )
    if job.exchange_of(optimizer) is not None:
        raise ValueError(f"optimizer {optimizer.name!r} is a DistributedOptimizer already")
    for value, default, argument in (
        (name, None, "name"),
        (device_dense, "", "device_dense"),
        (device_sparse, "", "device_sparse"),
        (sparse_as_dense, False, "sparse_as_dense"),
        (gradient_predivide_factor, 1.0, "gradient_predivide_factor"),
        (num_groups, 0, "num_groups"),
        (groups, None, "groups"),
    ):
        if value != default:
            job.hint(
                f"DistributedOptimizer({argument}={value!r}) changes nothing: dtk moves "
                "gradients in its own way; the optimizer gets the same"
            )
    factor = strategy.size if op is Sum else 1
    if passes != 1:
        inner = keras_optimizers.chain(optimizer)[-1]
        if inner.built or not isinstance(passes, int) or passes < 1:
            raise ValueError(
                f"backward_passes_per_step={passes!r}: expected a whole number, 1 or more, and an "
                "optimizer that has trained nothing yet"
            )
        inner.gradient_accumulation_steps = passes  # Keras applies the mean of a window
        factor *= 1 if average_aggregated_gradients else passes
    if factor != 1:
        make_subclass(optimizer, MultipliedGradients)
        vars(optimizer)["_dtk_factor"] = float(factor)
    job.mark(optimizer, check_compression(compression))
    return optimizer


class MultipliedGradients(keras.Optimizer):
    """An optimizer that multiplies gradients before it applies them."""

    _dtk_factor: float

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Gradients, trainable_variables: Sequence[keras.Variable] | None = None
    ) -> Tree:
        """Multiply gradients, then apply them."""

        def multiplied(values: tf.Tensor) -> tf.Tensor:
            return values * tf.cast(self._dtk_factor, values.dtype)

        gradients = [None if g is None else tf_replicas.on_values(g, multiplied) for g in grads]
        return super().apply(gradients, trainable_variables)


PartialDistributedOptimizer = replaced(
    "PartialDistributedOptimizer",
    "dtk keeps all weights equal on all ranks; write hvd.DistributedOptimizer(optimizer), and hold "
    "parts of a large model by dtk.layers",
)


def load_model(
    filepath: object,
    custom_optimizers: Sequence[type[keras.Optimizer]] | None = None,
    custom_objects: Mapping[str, object] | None = None,
    compression: str = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a saved model, its optimizer as a `DistributedOptimizer` with its state.

    Args:
        filepath: Path of the model.
        custom_optimizers: Classes of optimizers that are not Keras's.
        custom_objects: Other classes and functions by name.
        compression: What gradients are sent as.
        legacy_opts: Must be False: Keras 3 has no `tf.keras.optimizers.legacy`.

    Returns:
        The model.

    Raises:
        ReplacedError: `legacy_opts` is True.
    """
    if legacy_opts:
        raise ReplacedError(
            "legacy_opts=True: Keras 3 has no tf.keras.optimizers.legacy; load the model with "
            "compile=False and compile it with an optimizer of keras.optimizers"
        )
    job.strategy()
    own = {one.__name__: one for one in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**own, **(custom_objects or {})})
    trainer = trainer_of(model)
    if model.optimizer is not None and trainer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
        trainer.bind_optimizers()
    return model
