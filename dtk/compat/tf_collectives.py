"""Set how long TensorFlow's collective runtime waits for a silent task.

`MultiWorkerMirroredStrategy` configures the runtime unless it is already configured.
"""

from __future__ import annotations

from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

# A job survives a link that is down for less; with TensorFlow's own 10 s, 5 s can end a job. After
# a longer silence, dtk's watch names the rank, or TensorFlow ends the job.
SILENCE_SECONDS = 40


def let_tasks_be_silent(ranks: int) -> None:
    """Make the collective runtime, before it starts, wait 40 s for a silent task."""
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=1000 * SILENCE_SECONDS,
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=ranks)],
    )
