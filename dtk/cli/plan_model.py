"""`dtk plan --model`: how to divide one model among workers, layer by layer."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
from click.core import ParameterSource

from dtk.bench import page
from dtk.bench.results import read
from dtk.cli import links
from dtk.launch import agent, job_processes
from dtk.launch import job_options as jobs
from dtk.planning import quantity
from dtk.planning.calibration import software_of
from dtk.planning.inputs import Cluster, Job, Software
from dtk.planning.quantity import PlanError

if TYPE_CHECKING:
    import keras

    from dtk.planning.model.layer_costs import Operator, Rates

_SAVED = (".keras", ".h5")
# Options for plans on any number of workers, which do not apply to dividing one model.
_OTHERS = (
    "step_time",
    "parameters",
    "global_batch",
    "workers",
    "coding",
    "block_steps",
    "servers",
    "price_per_hour",
    "efficiency",
    "markdown_file",
    "plot",
)


class Place(NamedTuple):
    """Values of the options that say where the workers are."""

    processes: str | None
    hosts: str | None
    per_host: str | None
    bandwidth: str | None
    latency: str
    host_bandwidth: str | None
    host_latency: str


class Source(NamedTuple):
    """The source of costs: a benchmark's file, its communicator, and whether to time layers."""

    bench: str | None
    communicator: str | None
    measures: bool


def is_model(name: str) -> bool:
    """Return whether --model names a model to divide, and not one of a benchmark.

    Example:
        >>> [is_model(name) for name in ("resnet20", "model.keras", "nets.small:build")]
        [False, True, True]
    """
    return name.endswith(_SAVED) or ":" in name


def check_options() -> None:
    """Raise for options that do not apply to a model to divide."""
    context = click.get_current_context()
    for name in _OTHERS:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            option = "--" + name.removesuffix("_file").replace("_", "-")
            raise PlanError(
                f"{option} does not go with --model {context.params['model']}, which is planned "
                "for one number of workers (-n) and one --batch-size; leave it out"
            )


def check_no_model(
    processes: str | None, hosts: str | None, memory: str | None, no_measure: bool
) -> None:
    """Raise for options that need a model to divide."""
    given = {"-n": processes, "--hosts": hosts, "--memory": memory, "--no-measure": no_measure}
    for option, value in given.items():
        if value:
            raise PlanError(
                f"{option} divides a model among workers: add --model model.keras, or "
                "package.module:function; numbers of workers to compare are --workers 1,2,4"
            )


def plan(
    model: str,
    place: Place,
    source: Source,
    batch_size: str | None,
    memory: str | None,
    json_file: str | None,
) -> None:
    """Print the best plans and the reasons; write the best one."""
    workers, per_host = _placed(place)
    cluster = _cluster(place, source, workers, per_host)
    batch = Job.rows if batch_size is None else quantity.count("--batch-size", batch_size)
    most = math.inf if memory is None else quantity.size("--memory", memory)
    file = None if json_file is None else _writable(json_file)
    here = agent.cores()
    # A worker computes on its part of a host's cores, so measure in this process the same way.
    with job_processes.bound_to(here[: max(1, len(here) // min(per_host, workers))]):
        # TensorFlow starts here, with as many threads as there are cores.
        from dtk.planning.model import graph, layer_costs, report, search

        built = load(model)
        operators, outputs = graph.read(built)
        workload = layer_costs.Workload(
            operators,
            outputs,
            batch,
            _computing(built, operators, batch, source.measures),
            cluster,
            graph.slots(built),
            most,
        )
        choice = search.choose(workload, workers)
        best = choice.best.plan
        if file is not None:
            file.write_text(best.dumps())
        title = f"{model} on {workers} workers, {batch} rows"
        notes = [*report.why(workload, choice), "", _assumed(cluster), workload.computing.told]
        script = ["", best.script(json_file or "plan.json")]
        page.show([(title, report.table(choice))], [*notes, *script])


def load(given: str) -> keras.Model:
    """Load a saved model, or build one with a function."""
    import keras

    where = f"--model {given}"
    if given.endswith(_SAVED):
        if not Path(given).exists():
            raise PlanError(f"{where}: no such file; write it with model.save({given!r})")
        try:
            return keras.saving.load_model(given)
        except (OSError, ValueError, TypeError) as error:
            raise PlanError(f"{where}: Keras cannot load it: {error}") from error
    module, _, name = given.partition(":")
    if not module or not name.isidentifier():
        raise PlanError(
            f"{where}: expected a file that model.save wrote, such as model.keras, or "
            "package.module:function"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a script's modules are beside it
    try:
        build = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise PlanError(f"{where}: cannot import {module}: {error}") from error
    if not callable(build):
        raise PlanError(f"{where}: {module} has no function {name}")
    try:
        model = build()
    except TypeError as error:
        raise PlanError(f"{where}: calling {name}() failed: {error}") from error
    if not isinstance(model, keras.Model):
        raise PlanError(
            f"{where}: {name}() returned a {type(model).__name__}; expected a keras.Model"
        )
    return model


def _placed(place: Place) -> tuple[int, int]:
    """Return the number of workers, and the number per host."""
    hosts = jobs.places(place.hosts, None)
    workers = None if place.processes is None else quantity.count("-n", place.processes)
    jobs.check_slots(workers, hosts)
    if not hosts:
        if workers is None:
            raise PlanError("among how many workers? Add -n, such as -n 4, or --hosts a:2,b:2")
        if place.per_host is None:
            return workers, workers
        return workers, quantity.count("--workers-per-host", place.per_host)
    slots = {host.slots for host in hosts}
    if len(slots) > 1:
        raise PlanError(
            f"--hosts {place.hosts}: hosts have {sorted(slots)} slots; a plan takes all to be alike"
        )
    if place.per_host is not None:
        raise PlanError(f"--workers-per-host {place.per_host}: --hosts says so already; keep one")
    (per_host,) = slots
    return workers or per_host * len(hosts), per_host


def _cluster(place: Place, source: Source, workers: int, per_host: int) -> Cluster:
    software, hosts = Software(), 1
    if source.bench is not None:
        software, hosts = software_of(read(source.bench), source.communicator)
    elif source.communicator is not None:
        raise PlanError(
            f"--communicator {source.communicator} chooses from a benchmark; give its file with "
            "--bench"
        )
    return Cluster(
        links.network(hosts, per_host, (workers,), place.bandwidth, place.latency),
        links.link("--host-bandwidth", place.host_bandwidth, "--host-latency", place.host_latency),
        per_host,
        software=software,
    )


def _computing(model: keras.Model, operators: list[Operator], batch: int, measures: bool) -> Rates:
    from dtk.planning.model import measure

    rates = measure.rates_here(getattr(model, "optimizer", None))
    if not measures:
        return rates

    def told(name: str) -> None:
        click.echo(f"dtk plan: measuring {name}", err=True)

    return measure.MeasuredRates(model, operators, batch, rates, told)


def _assumed(cluster: Cluster) -> str:
    software, network = cluster.software, cluster.network
    speed = "no limit"
    if math.isfinite(network.bandwidth):
        speed = f"{8e-6 * network.bandwidth:.4g} Mbit/s"
    return (
        f"Assumed: workers on a host: {cluster.per_host}; software adds "
        f"{1e6 * software.message:.3g} us to a message and {1e9 * software.byte:.2g} ns to a byte; "
        f"between hosts {1e6 * network.latency:.3g} us and {speed}."
    )


def _writable(given: str) -> Path:
    """Return the file, or raise if it cannot be written, before minutes of measuring."""
    file = Path(given)
    folder = file.parent
    with contextlib.suppress(OSError):
        if folder.is_dir() and os.access(file if file.exists() else folder, os.W_OK):
            return file
    raise PlanError(f"--json {given}: cannot be written; name a file in a folder that is there")
