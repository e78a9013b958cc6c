"""The running replica of a `tf.distribute.Strategy`: its index and its part in reductions.

inside a scope   tf.compat.v1.reset_default_graph    scope_kept
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import keras
import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.ops import control_flow_util

from dtk import placement
from dtk.communicators.aligned_slices import with_values
from dtk.errors import UncompilableError
from dtk.nests import Tree
from dtk.patches import patch, temporarily

# A tensor, or a structure of tensors, `tf.IndexedSlices` and None.
_Structure = TypeVar("_Structure", bound=Tree)


def op_name(reduce_op: tf.distribute.ReduceOp | str) -> str:
    """Return a communicator's name for a reduction."""
    return str(getattr(reduce_op, "value", reduce_op)).lower()


def global_seed() -> int | None:
    """Return TensorFlow's global seed; None when none was set."""
    return context.global_seed()


def with_global_seed(seed: int | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which what is made, such as a shuffled dataset, has a global seed."""
    return patch(context, global_seed=lambda: seed)


def replica_index() -> int:
    """Return the index of the running replica in the job; call in a replica context."""
    replica = tf.distribute.get_replica_context()
    return int(replica._replica_id_in_sync_group)


class _Running(threading.local):
    """What this thread's replica does now: all that dtk's functions know without being told.

    Replicas of one process may be threads, and other threads may train other models.
    """

    def __init__(self) -> None:
        # the `traced_step.Step` that Keras's code is tracing, or runs eagerly; None outside of it
        self.step: object = None
        self.present: tf.Tensor | None = None  # whether it has rows; None: its values always count
        self.whole = False  # whether it computes a step as if there were one replica
        self.draws: object = None  # the `random_draws.Draws` of a step that is tried
        self.building = False  # whether layers, or seeds, are built in the midst of these
        # the variables whose gradients an optimizer applies
        self.applied: Sequence[keras.Variable] = ()
        # the `GradientExchange` whose optimizer, with those inside it, applies sums of all replicas
        self.applying: object = None
        # what a script's loop has assigned since it last applied an optimizer
        self.assigned_in_loop: dict[int, keras.Variable] = {}
        # by what it has multiplied its losses since then, and on which lines; its tapes' gradients
        self.loss_factors: list[tuple[tf.Tensor, str]] = []
        self.tape_gradients: list[tf.Tensor] = []
        # where calls that ask for other replicas' rows are listed; None if nobody asks
        self.calls_for_rows: list[str] | None = None
        # the context in which it lets replicas of its process run that take turns with it
        self.while_others_run: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.undistributed = False  # inside `dtk.strategies.undistributed()`


running = _Running()

# A job survives a link that is down for less; with TensorFlow's own 10 s, 5 s can end a job. After
# a longer silence, dtk's watch names the rank, or TensorFlow ends the job.
SILENCE_SECONDS = 40

# With fewer elements, multiplying is cheaper than branching.
_FEW = 1 << 14


def counted_if(present: tf.Tensor | None) -> AbstractContextManager[None]:
    """Return a context in which this replica adds zeros to sums over replicas unless it has rows.

    With None, its values always count.
    """
    return temporarily(running, present=present)


def if_present(value: _Structure) -> _Structure:
    """Replace values by zeros where the running replica has no rows."""
    present = running.present
    flat = tf.nest.flatten(value)
    if present is None or not flat:
        return value
    # Indices stay out of the branch, which would hide their origin in the graph.
    tensors = [
        v.values if isinstance(v, tf.IndexedSlices) else tf.convert_to_tensor(v)
        for v in flat
        if v is not None
    ]
    elements = [v.shape.num_elements() for v in tensors]
    if None not in elements and sum(elements) < _FEW:
        counted = [_times(v, present) for v in tensors]
    else:
        counted = tf.cond(
            present,
            lambda: [tf.identity(v) for v in tensors],
            lambda: [tf.zeros_like(v) for v in tensors],
        )
    remaining = iter(counted)
    flat = [None if v is None else on_values(v, lambda _: next(remaining)) for v in flat]
    return tf.nest.pack_sequence_as(value, flat)


def on_values(
    gradient: tf.Tensor | tf.IndexedSlices, function: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor | tf.IndexedSlices:
    """Apply a function to a tensor, or to the values of slices."""
    if isinstance(gradient, tf.IndexedSlices):
        return with_values(gradient, function(gradient.values))
    return function(gradient)


def _times(value: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
    if value.dtype.is_floating:
        return tf.math.multiply_no_nan(value, tf.cast(present, value.dtype))
    return tf.where(present, value, tf.zeros_like(value))


@contextlib.contextmanager
def as_one_replica(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Return a context in which one replica computes a step and nothing is reduced."""
    with as_only_replica(), tf.device(placement.computing(strategy)), in_replica(strategy):
        yield


def as_only_replica() -> AbstractContextManager[None]:
    """Return a context in which this process is the only replica, outside of a step, too."""
    return temporarily(running, whole=True)


def computes_as_one_replica() -> bool:
    """Return whether this thread computes a step as if there were one replica."""
    return running.whole


def refuse_under_xla() -> None:
    """Raise if XLA is to compile the function that is being traced."""
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UncompilableError(
            "the step sums over replicas in a function with jit_compile=True, and XLA can compile "
            "no communication; call the optimizer, and all_reduce, outside of that function"
        )


def in_replica(strategy: tf.distribute.Strategy) -> tf.distribute.ReplicaContext:
    """Return a context in which Keras acts as the only replica of a strategy."""
    return tf.distribute.ReplicaContext(strategy, 0)


def scope_kept() -> AbstractContextManager[None]:
    """Return a context in which `keras.utils.clear_session()` keeps the open scope.

    It replaces the graph that holds the scopes of strategies: later variables would be made outside
    the scope, and leaving it would fail.
    """
    return patch(tf.compat.v1, reset_default_graph=lambda: None)


def let_tasks_be_silent(ranks: int) -> None:
    """Make the collective runtime, before it starts, wait 40 s for a silent task."""
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=1000 * SILENCE_SECONDS,
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=ranks)],
    )
