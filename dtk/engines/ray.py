"""dtk on Ray: Ray starts workers and starts them again, dtk trains in them and reports to Ray.

    KerasTrainer    Ray Train's own trainer; its workers find their rank in torch's variables
    ReportToRay     numbers and checkpoints of an epoch go to Ray, and come back after a restart
    EveryRow        how a dataset of Ray's is divided among the workers
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dtk.cluster import failures, stop_requests
from dtk.engines import variables_of, without_place
from dtk.nests import Function
from dtk.version import pip_install

try:
    import ray
    import ray.data
    import ray.train
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
except ImportError as error:
    raise ImportError(
        f"dtk.engines.ray needs Ray ({error}); run `{pip_install('ray')}`"
    ) from error

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.worker_group import WorkerGroup

    from dtk.engines.ray_report import ReportToRay

__all__ = ["EveryRow", "KerasTrainer", "ReportToRay"]


def __getattr__(name: str) -> object:
    # Imported when asked for: it needs TensorFlow, and Ray's controller and the script do not.
    if name == "ReportToRay":
        from dtk.engines.ray_report import ReportToRay

        return ReportToRay
    raise AttributeError(f"module 'dtk.engines.ray' has no attribute {name!r}")


class EveryRow(ray.train.DataConfig):
    """Division of datasets among workers that leaves out no row, in an order that is kept.

    Ray's own `DataConfig` drops rows until all shards are equally long. Here shards differ by a
    block of rows at most.
    """

    def configure(
        self,
        datasets: Mapping[str, ray.data.Dataset],
        world_size: int,
        worker_handles: object,
        worker_node_ids: object,
        **kwargs: object,
    ) -> list[dict[str, ray.data.DataIterator]]:
        """Return each worker's shards, by the names of the datasets."""
        shards: list[dict[str, ray.data.DataIterator]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            options = dataset.context.copy().execution_options
            options.preserve_order = True
            own = dataset.copy(dataset)
            own.context.execution_options = options
            for shard, part in zip(shards, own.streaming_split(world_size), strict=True):
                shard[name] = part
        return shards


class KerasTrainer(DataParallelTrainer):
    """Ray Train's trainer for functions that train by a dtk strategy.

    The function runs in each worker; it makes a strategy, compiles in its scope and calls `fit`.

    Args:
        train_fn: The function, without arguments or with `train_loop_config`.
        train_loop_config: What is handed to it, a dict.
        scaling_config: How many workers there are, and what each needs (`ray.train.ScalingConfig`).
        run_config: Where results lie, and what happens after failures (`ray.train.RunConfig`).
        datasets: Ray's datasets by name; `ray.train.get_dataset_shard(name)` is a worker's shard.
        dataset_config: How they are divided; by default no row is left out (`EveryRow`).

    Example:
        See examples/ray_digits.py.
    """

    def __init__(
        self,
        train_fn: Function[object],
        train_loop_config: dict[str, object] | None = None,
        *,
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: ray.train.RunConfig | None = None,
        datasets: dict[str, ray.data.Dataset] | None = None,
        dataset_config: ray.train.DataConfig | None = None,
    ):
        super().__init__(
            _telling(train_fn),
            train_loop_config=train_loop_config,
            backend_config=_Config(),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config or EveryRow(),
        )

    def fit(self) -> ray.train.Result:
        """Train, and return Ray's result.

        Raises:
            ray.train.TrainingFailedError: Workers failed more often than `run_config` allows.
        """
        if not ray.is_initialized():
            ray.init()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if message := too_small(self.scaling_config, nodes):
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return super().fit()


def _telling(train_fn: Function[object]) -> Function[object]:
    """Return the function, whose exceptions are told to the other workers, and say who was first.

    Ray catches them, and tells one of them.
    """

    @functools.wraps(train_fn)
    def telling(*given: object, **named: object) -> object:
        try:
            return train_fn(*given, **named)
        except Exception as error:
            if first := failures.tell(failures.of(error)):
                error.add_note(f"dtk: {first}")
            raise

    return telling


def too_small(scaling: ray.train.ScalingConfig, nodes: Sequence[Mapping[str, float]]) -> str:
    """Say that the workers do not fit on nodes with these resources; "" where they do."""
    wanted = scaling.num_workers
    fewest, most = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    each = {name: total / max(1, most) for name, total in scaling.total_resources.items() if total}
    room = sum(min(int(has.get(n, 0) // need) for n, need in each.items()) for has in nodes)
    if room >= fewest:
        return ""
    needs = " and ".join(f"{need:g} {name}" for name, need in each.items())
    return (
        f"{fewest} workers of {needs} each do not fit on Ray's {len(nodes)} node(s), which have "
        f"room for {room}: Ray waits until more nodes join. If none will, end this with Ctrl-C and "
        f"use ScalingConfig(num_workers={max(1, room)}) or less resources_per_worker"
    )


class _Config(BackendConfig):
    def __init__(self) -> None:
        self.secret = secrets.token_hex(32)

    @property
    def backend_cls(self) -> type[Backend]:
        return _Backend


class _Place(NamedTuple):
    node: str
    address: str
    port: int


class _Backend(Backend):
    def on_start(self, worker_group: WorkerGroup, backend_config: _Config) -> None:
        """Tell each worker its place, in the variables of torch's convention."""
        places: list[_Place] = worker_group.execute(_find_place)
        nodes, first = [place.node for place in places], places[0]
        begun = []
        for rank in range(len(nodes)):
            own = variables_of(rank, nodes, first.address, first.port, backend_config.secret)
            begun.append(worker_group.execute_single_async(rank, _take_place, own))
        ray.get(begun)


def _find_place() -> _Place:
    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server(("", 0), family=family) as listener:
        port = int(listener.getsockname()[1])
    return _Place(ray.get_runtime_context().get_node_id(), address, port)


def _take_place(variables: Mapping[str, str]) -> None:
    # Of whoever started Ray's nodes, as `srun ray start`: they tell of other ranks.
    for name in os.environ.keys() - without_place(os.environ).keys():
        del os.environ[name]
    os.environ.update(variables)
    with contextlib.suppress(ValueError):  # no main thread: then SIGTERM ends the worker at once
        stop_requests.forward_sigterm()
