"""Weights on parameter servers, gradients from workers, `fit` on a chief."""

from __future__ import annotations

import os
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from dtk import cluster, quiet
from dtk.cluster import progress, tf_config
from dtk.cluster.variables import RESTARTS
from dtk.communicators import startup
from dtk.communicators.local import LocalCommunicator
from dtk.compat import keras_variables, tf_extended, tf_servers
from dtk.compat.tf_datasets import MakesDataset
from dtk.errors import ClusterError
from dtk.exchange import Downpour, Quantized, parse
from dtk.parameter_server import (
    chief_trainer,
    consistency_models,
    run_server,
    scheduler,
    worker_data,
    worker_pool,
)
from dtk.parameter_server.evaluator import EvaluatorTrainer
from dtk.parameter_server.job_context import EvaluatorConfig, JobStrategy
from dtk.strategies import devices, start
from dtk.strategies.cluster_resolver import JobResolver
from dtk.strategies.dtk_strategy import DtkStrategy
from dtk.trainer.distributed_model import trainer_of
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.replica import self_test as self_testing


class ParameterServerStrategy(JobStrategy, DtkStrategy, tf_servers.ServerStrategy):
    """Training with weights on parameter servers, synchronous or not.

    Every task runs the same script. Workers and parameter servers stay in this constructor, serve,
    and end with the job; the chief leaves it and runs `fit`. So does the evaluator, if the job has
    one, but its `fit` evaluates the checkpoints that the chief saves (see
    `dtk.parameter_server.evaluator`). If a worker is lost, no step is lost: another worker takes
    over its step, and a restarted worker takes part again.

    The consistency decides what a step is. "sync": one global batch, cut over the workers; the sum
    of exactly N gradients is applied, so the weights equal those of one process. "async" and
    `BoundedDelay`: one batch of `batch_size` rows on one worker, applied by itself. Either way
    `fit` of R rows takes ceil(R / batch_size) steps an epoch, and each is applied exactly once.

    Args:
        consistency: "sync", "async", `Sync(backup_workers=b)` or `BoundedDelay(tau)`.
        variable_partitioner: Cuts large variables into parts on several servers, such as
            `tf.distribute.experimental.partitioners.MinSizePartitioner()`; None cuts none. An
            optimizer updates each part separately. Optimizers that need the whole variable (Lamb,
            LARS, Adafactor, Muon's matrices) are refused; your own optimizers must not need it.
        exchange: A `dtk.exchange.Downpour`, to push and fetch less, or a `Quantized`, to push a few
            bits of each entry ("1bit" and the like for short); None sends every gradient.
        self_test: As for `AllReduceStrategy`; only steps that are cut over workers need it.
        evaluator: When the evaluator of `dtk run --evaluator` evaluates, and what it exports; None
            evaluates every checkpoint on all validation data.

    Raises:
        ClusterError: TF_CONFIG describes no such job, or a task does not start.
        ValueError: The consistency does not exist, or leaves no worker.

    Example:
        >>> import dtk
        >>> strategy = dtk.strategies.ParameterServerStrategy("async")  # doctest: +SKIP

    Sources: Li et al., OSDI'14 (parameter server, bounded delay); Chen et al. 2016 (backup
    workers).
    """

    supports_jit = False

    def __init__(
        self,
        consistency: consistency_models.Consistency | str = "async",
        variable_partitioner: tf.distribute.experimental.partitioners.Partitioner | None = None,
        exchange: Downpour | Quantized | str | None = None,
        *,
        self_test: bool | str = "auto",
        evaluator: EvaluatorConfig | None = None,
    ):
        """Take the arguments that the class describes."""
        self.evaluator = evaluator or EvaluatorConfig()
        self.self_test = self_testing.is_wanted(self_test)
        self.consistency = consistency_models.parse(consistency)
        self.exchange = _checked(exchange, self.consistency)
        config = _config()
        _check(config, self.consistency)
        gpu = devices.take_gpu_of_task(config)
        if config.role != "evaluator":
            who = "the chief" if config.role == "chief" else f"{config.role} {config.index}"
            start.end_at_once(who)
        if config.role in ("ps", "worker"):
            run_server.serve(config, gpu)
        self.workers = len(config.cluster["worker"])
        self.moved = np.zeros((self.workers, 3), np.int64)
        self.is_evaluator = config.role == "evaluator"
        self.has_evaluator = "evaluator" in config.cluster
        if self.is_evaluator:
            self._become_evaluator(config)
        else:
            self._become_chief(config, variable_partitioner)

    def _become_evaluator(self, config: cluster.TFConfig) -> None:
        """Evaluate in plain Keras beside the job."""
        self.chief = run_server.Chief(config)
        # A restarted evaluator may come after training, when the chief is gone; it still evaluates.
        if int(os.environ.get(RESTARTS) or 0) == 0:
            self.chief.await_()
        progress.start()
        with quiet.device_start():
            local = LocalCommunicator()
            device = devices.pin(local)
        super().__init__(
            tf_extended.AllReduceExtended(self, device, local),
            local,
            JobResolver(run_server.cluster_of(config), task_type="evaluator", task_id=0),
        )

    def _become_chief(
        self,
        config: cluster.TFConfig,
        variable_partitioner: tf.distribute.experimental.partitioners.Partitioner | None,
    ) -> None:
        resolver = JobResolver(
            run_server.cluster_of(config), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        progress.start()
        with progress.joining("the start of workers and servers"):
            startup.check_free(0, config.cluster["chief"][0], config.training)
            tasks = {
                f"{role} {index}": address
                for role in ("ps", "worker")
                for index, address in enumerate(config.cluster[role])
            }
            run_server.await_tasks("chief", tasks)
            threads = run_server.threads_to_wait_with()
            tf.config.threading.set_inter_op_parallelism_threads(threads)
            with quiet.device_start(), startup.quiet(), startup.at_most(startup.limit()):
                self.connect(resolver)
        super().__init__(
            tf_servers.ParameterServerExtended(self, resolver, variable_partitioner),
            LocalCommunicator(),
            resolver,
        )
        self.pool = worker_pool.WorkerPool(
            self, config.cluster["worker"], config.cluster["ps"], patience=startup.limit()
        )
        tf_servers.silence_coordinator()

    @property
    def size(self) -> int:
        """Number of workers whose gradients count."""
        return self.workers - self.consistency.spare

    @property
    def processes(self) -> int:
        """Number of processes that compute: the chief and the workers."""
        return 1 if self.is_evaluator else 1 + self.workers

    def make_trainer(self, model: keras.Model) -> DistributedTrainer:
        """Make a trainer whose steps run on workers, or the evaluator's, which takes no steps."""
        made = EvaluatorTrainer if self.is_evaluator else chief_trainer.ParameterServerTrainer
        return made(model, self)

    def take_variables(self, variables: Sequence[keras.Variable]) -> None:
        """Move variables that were created outside the scope to the servers."""
        if self.is_evaluator:
            return
        with self.scope():
            for variable in variables:
                if not keras_variables.is_on_server(keras_variables.stored(variable)):
                    keras_variables.move_variable(variable)

    def take_metric_state(self, variables: Sequence[keras.Variable]) -> None:
        """Move metric state that was created outside the scope to the chief."""
        self.take_variables(variables)

    def per_worker_dataset(self, dataset_fn: MakesDataset) -> worker_data.WorkerDataset:
        """Make a dataset of pipelines that workers read themselves.

        Args:
            dataset_fn: Makes a worker's pipeline from a `tf.distribute.InputContext`.

        Returns:
            See `dtk.parameter_server.worker_data`.
        """
        return worker_data.worker_dataset(dataset_fn, self.workers, self.slices)

    def schedule_of(self, model: keras.Model) -> scheduler.Schedule:
        """Return the schedule that decides which step of a model may start.

        Args:
            model: A model trained under this strategy.

        Returns:
            The schedule, with its statistics.

        Raises:
            ValueError: The model has not been trained under this strategy.
        """
        trainer = trainer_of(model)
        if (
            not isinstance(trainer, chief_trainer.ParameterServerTrainer)
            or trainer.schedule is None
        ):
            raise ValueError(
                f"model {model.name!r} has taken no step under this strategy; call fit first"
            )
        return trainer.schedule


def _config() -> cluster.TFConfig:
    config = tf_config.parse(os.environ.get("TF_CONFIG", ""))
    if config is None:
        raise ClusterError(
            f"ParameterServerStrategy needs TF_CONFIG, which is not set here "
            f"({cluster.detect().reason}); start with `dtk run -n 2 --ps 1 train.py`"
        )
    return config


def _checked(
    exchange: Downpour | Quantized | str | None, consistency: consistency_models.Consistency
) -> Downpour | None:
    if exchange is None:
        return None
    consistency_models.check_no_exchange(exchange)
    exchange_op = parse(exchange) if isinstance(exchange, str) else exchange
    if isinstance(exchange_op, Quantized):
        if not exchange_op.codes:
            return None
        exchange_op = Downpour(bits=exchange_op.bits)
    if not isinstance(exchange_op, Downpour):
        raise ValueError(
            f"exchange={exchange_op!r}; expected dtk.exchange.Downpour(...), Quantized(bits), or "
            "None to send every gradient as it is"
        )
    if isinstance(consistency, consistency_models.Sync):
        raise ValueError(
            f"exchange={exchange_op!r} with consistency={consistency!r}: workers with local steps "
            'are not synchronous; use "async" or BoundedDelay(tau)'
        )
    if (
        isinstance(consistency, consistency_models.BoundedDelay)
        and exchange_op.fetch > exchange_op.push_every
    ):
        raise ValueError(
            f"exchange={exchange_op!r} with consistency={consistency!r}: weights kept after a push "
            'may be later than the bound allows; use "async", or fetch with every push'
        )
    return exchange_op


def _check(config: cluster.TFConfig, value: consistency_models.Consistency) -> None:
    for role, name in (("ps", "parameter server"), ("worker", "worker"), ("chief", "chief")):
        if not config.cluster.get(role):
            counts = ", ".join(f"{len(a)} {r}" for r, a in config.cluster.items())
            raise ClusterError(
                f"{config.role} {config.index}: the job has no {name} (TF_CONFIG lists {counts}); "
                "start with `dtk run -n 2 --ps 1 train.py`, or give TF_CONFIG a chief, a worker "
                "and a ps"
            )
    value.slices(len(config.cluster["worker"]))  # raises if there are too few workers
