"""Horovod's tape: gradients of a script's own loop, combined over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import tensorflow as tf

from dtk.migrate.horovod import job
from dtk.migrate.horovod.collectives import (
    Average,
    Compression,
    ReduceOp,
    check_compression,
    check_op,
    check_placing,
    global_process_set,
    grouped_allreduce,
)
from dtk.migrate.horovod.replaced import replaced
from dtk.nests import Tree

_LOCAL = (
    "dtk keeps all weights equal on all ranks; write hvd.DistributedGradientTape(tape), and hold "
    "parts of a large model by dtk.layers"
)


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` combines those of all ranks.

    The script's own loop may apply optimizers to the variables of these gradients.

    Arguments that say how Horovod moves gradients change nothing here: device_dense, device_sparse,
    gradient_predivide_factor, num_groups, groups and scale_local_gradients.

    Args:
        gradtape: The tape, used already or to be used by `with`.
        device_dense: Not needed.
        device_sparse: Not needed.
        compression: What gradients are sent as.
        sparse_as_dense: Whether `tf.IndexedSlices` become tensors before.
        op: How gradients are combined, as in `allreduce`.
        gradient_predivide_factor: Not needed.
        num_groups: Not needed.
        groups: Not needed.
        process_set: Must be `global_process_set`.
        scale_local_gradients: Not needed.

    Example:
        >>> import dtk.migrate.horovod as hvd, tensorflow as tf
        >>> hvd.init()
        >>> x = tf.Variable(3.0)
        >>> with tf.GradientTape() as tape:
        ...     y = x * x
        >>> float(hvd.DistributedGradientTape(tape).gradient(y, x))
        6.0
        >>> hvd.shutdown()
    """

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: str = Compression.none,
        sparse_as_dense: bool = False,
        op: ReduceOp = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[object] | None = None,
        process_set: object = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        check_placing({"process_set": process_set})
        self._tape, self._dense = gradtape, sparse_as_dense
        self._op, self._compression = check_op(op), check_compression(compression)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tape.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> object:
        return getattr(self._tape, name)

    register_local_source = staticmethod(replaced("register_local_source", _LOCAL))

    def gradient(
        self,
        target: Tree,
        sources: Tree,
        output_gradients: Tree = None,
        use_generic_names: bool = False,
    ) -> Tree:
        """Return the gradients, combined over all ranks.

        Args:
            target: As in `tf.GradientTape.gradient`.
            sources: As in `tf.GradientTape.gradient`.
            output_gradients: As in `tf.GradientTape.gradient`.
            use_generic_names: Not needed.
        """
        job.note_summed(tf.nest.flatten(sources))
        structure = self._tape.gradient(target, sources, output_gradients)
        leaves = tf.nest.flatten(structure)
        tensors = [tf.convert_to_tensor(g) if self._dense else g for g in leaves if g is not None]
        combined = iter(grouped_allreduce(tensors, compression=self._compression, op=self._op))
        kept = [None if leaf is None else next(combined) for leaf in leaves]
        gradients: Tree = tf.nest.pack_sequence_as(structure, kept)
        return gradients


PartialDistributedGradientTape = replaced("PartialDistributedGradientTape", _LOCAL)
