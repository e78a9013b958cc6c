"""How long the runtime of TensorFlow's collectives waits for a silent task.

`MultiWorkerMirroredStrategy` configures it, unless somebody has before.
"""

from __future__ import annotations

from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

# A link that is down for less costs no job: TensorFlow's own 10 s end one after 5 s of it. For
# longer than this, dtk's own watch names the rank, or TensorFlow ends the job.
SILENCE_SECONDS = 40


def let_tasks_be_silent(ranks: int) -> None:
    """Let the coming collective runtime wait for a task that is silent for 40 s."""
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=1000 * SILENCE_SECONDS,
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=ranks)],
    )
