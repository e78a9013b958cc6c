"""`dtk plan`: predict how long a step takes on more workers and on other links.

With a model to divide, how to divide it among workers, layer by layer (`dtk.planning.model`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from dtk.bench import page
from dtk.bench.results import read
from dtk.errors import check_writable
from dtk.launch import agent, job_processes
from dtk.launch import job_options as jobs
from dtk.planning import inputs, tables
from dtk.planning.calibration import Calibration, calibrated, software_of
from dtk.planning.inputs import Cluster, Link, PlanError, Software, Training
from dtk.planning.plan_methods import sweep

if TYPE_CHECKING:
    import keras

_SAVED = (".keras", ".h5")
# Options that divide one model, and those for plans on any number of workers.
_DIVIDING = "-n --hosts --memory --no-measure"
_SWEEPING = (
    "--step-time --parameters --global-batch --workers --coding --block-steps --servers "
    "--price-per-hour --efficiency --markdown --plot"
)


class Quantity(click.ParamType):  # type: ignore[type-arg, explicit-any]
    """A number with a unit."""

    def __init__(self, name: str, reader: Callable[[str, str], object]):
        self.name, self._reader = name, reader

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Read an option."""
        if param is None or not isinstance(value, str):
            return value
        try:
            return self._reader(param.opts[0], value)
        except PlanError as error:
            raise jobs.Refused("plan", str(error)) from None


_COUNT, _ROWS = Quantity("N", inputs.parse_count), Quantity("ROWS", inputs.parse_count)
_COUNTS = Quantity("N,...", inputs.parse_counts)
_TIME, _SPEED = Quantity("TIME", inputs.parse_seconds), Quantity("SPEED", inputs.parse_bandwidth)
_STEP = Quantity("TIME", functools.partial(inputs.parse_seconds, zero="a step takes time"))
_BYTES = Quantity("BYTES", inputs.parse_size)


@click.command(
    "plan",
    cls=jobs.JobCommand,
    context_settings={"show_default": True},
    epilog="""
    \b
    dtk bench --model resnet20 --json bench.json
    dtk plan --bench bench.json --bandwidth 1Gbit/s --latency 50us
    dtk plan --step-time 85ms --parameters 270k --bandwidth 1Gbit/s --workers 1,...,64
    dtk plan --model model.keras -n 4 --batch-size 256 --json plan.json
    """,
)
@click.option("--bench", metavar="FILE", help="Calibrate with what `dtk bench --json` wrote.")
@click.option(
    "--model",
    metavar="NAME",
    help="Model in that file, if there are several; or a model to divide: model.keras, or a "
    "function that builds it, package.module:function.",
)
@click.option(
    "--communicator", metavar="NAME", help="Communicator in that file, if there are several."
)
@click.option("--step-time", type=_STEP, help="Time of a worker's step without sending, e.g. 85ms.")
@click.option("--parameters", type=_COUNT, help="Trainable parameters, e.g. 270k.")
@click.option(
    "--batch-size",
    type=_ROWS,
    help="Rows of that step per worker; with a model to divide, of all workers. Default: 32.",
)
@click.option(
    "--global-batch",
    type=_ROWS,
    help="Rows of all workers, for any number of them. Default: --batch-size per worker.",
)
@click.option("--workers", type=_COUNTS, default="1,...,4096", help="`...` doubles.")
@click.option("--workers-per-host", type=_COUNT, help="Default: the benchmark's, or 1.")
@click.option("--bandwidth", type=_SPEED, help="Between hosts, each way, e.g. 1Gbit/s.")
@click.option("--latency", type=_TIME, default="0us", help="Between hosts, one way, e.g. 50us.")
@click.option("--host-bandwidth", type=_SPEED, help="Within a host. Default: as fast as copying.")
@click.option("--host-latency", type=_TIME, default="0us", help="Within a host.")
@click.option("--coding", type=_TIME, help="Time to code a parameter in a few bits, e.g. 8.2ns.")
@click.option(
    "--block-steps", type=_COUNT, default="16", help="Steps in a block of block momentum."
)
@click.option("--servers", type=_COUNT, default="1", help="Parameter servers.")
@click.option(
    "--price-per-hour",
    type=click.FloatRange(0, math.inf, max_open=True),
    default=0.0,
    help="Price of a host, any currency.",
)
@click.option(
    "--efficiency",
    type=click.FloatRange(0, 1, min_open=True),
    default=tables.TARGET,
    help="Least efficiency wanted.",
)
@click.option("-n", "processes", type=_COUNT, help="Workers that a model is divided among.")
@jobs.hosts
@click.option("--memory", type=_BYTES, help="Memory of a worker, to divide a model, e.g. 8GB.")
@click.option(
    "--no-measure",
    is_flag=True,
    help="Do not measure the layers of a model to divide; count operations.",
)
@click.option("--json", "json_file", metavar="FILE", help="Write all predictions there.")
@click.option("--markdown", "markdown_file", metavar="FILE", help="Write the tables there.")
@click.option("--plot", metavar="FILE", help="Draw the curve there (.svg, .png, .pdf).")
def plan(
    bench: str | None,
    model: str | None,
    communicator: str | None,
    step_time: float | None,
    parameters: int | None,
    batch_size: int | None,
    global_batch: int | None,
    workers: tuple[int, ...],
    workers_per_host: int | None,
    bandwidth: float | None,
    latency: float,
    host_bandwidth: float | None,
    host_latency: float,
    coding: float | None,
    block_steps: int,
    servers: int,
    price_per_hour: float,
    efficiency: float,
    processes: int | None,
    hosts: str | None,
    memory: float | None,
    no_measure: bool,
    json_file: str | None,
    markdown_file: str | None,
    plot: str | None,
) -> None:
    """Predict time, efficiency and cost on up to thousands of workers.

    Predictions for each strategy and exchange follow from one step, measured or given, and the
    links between hosts. If you give a step and --bench, the costs of messages and bytes come from
    the benchmark. Nothing is run. docs/command-line.md has the formulas, the errors of past
    predictions, and when not to trust them.

    With a model to divide (--model model.keras, or package.module:function) dtk measures the
    model's layers on this machine, and searches for the fastest way to divide rows, channels,
    images and stages among -n workers.
    """
    check_writable({"--json": json_file, "--markdown": markdown_file, "--plot": plot})
    divided = model is not None and (model.endswith(_SAVED) or ":" in model)
    chosen = {"--model": None if divided else model, "--communicator": communicator}
    for option, name in chosen.items():
        if bench is None and name is not None:
            raise PlanError(f"{option} {name} chooses from a benchmark; give its file with --bench")
    within = Link(host_latency, host_bandwidth or math.inf)
    if model is not None and divided:
        _refuse(
            _SWEEPING,
            f"does not go with --model {model}, which is planned for one number of workers (-n) "
            "and one --batch-size; leave it out",
        )
        count, per_host = _placed(processes, hosts, workers_per_host)
        software, measured = Software(), 1
        if bench is not None:
            software, measured = software_of(read(bench), communicator)
        between = _network(measured, per_host, (count,), bandwidth, latency)
        cluster = Cluster(between, within, per_host, software=software)
        rows = batch_size or Training.rows
        _divide(model, count, cluster, rows, memory or math.inf, not no_measure, json_file)
        return
    _refuse(
        _DIVIDING,
        "divides a model among workers: add --model model.keras, or package.module:function; "
        "numbers of workers to compare are --workers 1,2,4",
    )
    given = None
    if step_time is not None and parameters is not None:
        given = Training(step_time, parameters, batch_size or Training.rows)
    if bench is None:
        if given is None:
            raise PlanError(
                "how long does a step take, of what? Give --bench and what `dtk bench --json` "
                "wrote, or --step-time and --parameters"
            )
        known = Calibration(given, Software(), per_host=1, hosts=1)
    else:
        if given is None:
            _refuse(
                "--step-time --parameters --batch-size",
                f"was given, and {bench} says so already; leave it out, or give --step-time and "
                "--parameters for another model over what sends there",
            )
        known = calibrated(read(bench), model, communicator)
        if given is not None:
            # The costs of sending, for a model that was not measured.
            software = dataclasses.replace(known.software, product=0.0, hidden=0.0)
            known = dataclasses.replace(known, job=given, software=software)
    software, per_host = known.software, workers_per_host or known.per_host
    if coding is not None:
        coded = {**software.coding, "8bit": coding, "1bit": coding}
        software = dataclasses.replace(software, coding=coded)
    job = dataclasses.replace(known.job, global_batch=global_batch, block_steps=block_steps)
    between = _network(known.hosts, per_host, workers, bandwidth, latency)
    cluster = Cluster(between, within, per_host, servers, price_per_hour, software)
    predictions = sweep(job, cluster, workers)
    advice = tables.advise(predictions, job, cluster, efficiency)
    if plot is not None:
        tables.draw(predictions, plot)
    if json_file is not None:
        Path(json_file).write_text(tables.dumps(predictions, job, cluster, advice))
    shown = [*tables.by_title(predictions).items()]
    page.show(shown, tables.notes(job, cluster, advice), markdown_file)


def _refuse(options: str, why: str) -> None:
    """Raise PlanError if one of these options was given."""
    context = click.get_current_context()
    for one in context.command.params:
        given = context.get_parameter_source(one.name or "") is not ParameterSource.DEFAULT
        if given and one.opts[0] in options.split():
            raise PlanError(f"{one.opts[0]} {why}")


def _network(
    measured: int, per_host: int, counts: Sequence[int], bandwidth: float | None, latency: float
) -> Link:
    """Return the links between hosts."""
    if measured > 1:
        if bandwidth is not None:
            raise PlanError(
                f"--bandwidth: the benchmark was run between {measured} hosts and holds their "
                "network; leave it out, or give one that was run on a single host"
            )
        return Link()
    if bandwidth is None and counts[-1] > per_host:
        raise PlanError(
            f"{counts[-1]} workers are more than a host's {per_host}: say what joins hosts, e.g. "
            "`--bandwidth 1Gbit/s --latency 50us`"
        )
    return Link(latency, bandwidth or math.inf)


# --- a model to divide ---


def _divide(
    given: str,
    workers: int,
    cluster: Cluster,
    batch: int,
    memory: float,
    measures: bool,
    json_file: str | None,
) -> None:
    """Print the best plans and the reasons; write the best one."""
    here = agent.cores()
    # A worker computes on its part of a host's cores, so measure in this process the same way.
    with job_processes.bound_to(here[: max(1, len(here) // min(cluster.per_host, workers))]):
        # TensorFlow starts here, with as many threads as there are cores.
        from dtk.planning.model import graph, layer_costs, layer_times, reasons, search

        model = load(given)
        operators, outputs = graph.read(model)
        computing = layer_times.rates_here(getattr(model, "optimizer", None))
        if measures:
            computing = layer_times.MeasuredRates(model, operators, batch, computing, _say)
        workload = layer_costs.Workload(
            operators, outputs, batch, computing, cluster, graph.slots(model), memory
        )
        choice = search.choose(workload, workers)
        best = choice.best.plan
        if json_file is not None:
            Path(json_file).write_text(best.dumps())
        title = f"{given} on {workers} workers, {batch} rows"
        assumed = ["", f"Assumed: {tables.links(cluster)}.", computing.told, ""]
        notes = [*reasons.why(workload, choice), *assumed, best.script(json_file or "plan.json")]
        page.show([(title, reasons.table(choice))], notes)


def _say(name: str) -> None:
    click.echo(f"dtk plan: measuring {name}", err=True)


def load(given: str) -> keras.Model:
    """Load a saved model, or build one with a function."""
    import keras

    def failed(why: str) -> PlanError:
        return PlanError(f"--model {given}: {why}")

    if given.endswith(_SAVED):
        if not Path(given).exists():
            raise failed(f"no such file; write it with model.save({given!r})")
        try:
            return keras.saving.load_model(given)
        except (OSError, ValueError, TypeError) as error:
            raise failed(f"Keras cannot load it: {error}") from error
    module, _, name = given.partition(":")
    if not module or not name.isidentifier():
        raise failed(
            "expected a file that model.save wrote, such as model.keras, or package.module:function"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a script's modules are beside it
    try:
        build = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise failed(f"cannot import {module}: {error}") from error
    if not callable(build):
        raise failed(f"{module} has no function {name}")
    try:
        model = build()
    except TypeError as error:
        raise failed(f"calling {name}() failed: {error}") from error
    if not isinstance(model, keras.Model):
        raise failed(f"{name}() returned a {type(model).__name__}; expected a keras.Model")
    return model


def _placed(workers: int | None, given: str | None, per_host: int | None) -> tuple[int, int]:
    """Return the number of workers, and the number per host."""
    hosts = jobs.places(given, None)
    jobs.check_slots(workers, hosts)
    if not hosts:
        if workers is None:
            raise PlanError("among how many workers? Add -n, such as -n 4, or --hosts a:2,b:2")
        return workers, per_host or workers
    slots = {host.slots for host in hosts}
    if len(slots) > 1:
        raise PlanError(
            f"--hosts {given}: hosts have {sorted(slots)} slots; a plan takes all to be alike"
        )
    if per_host is not None:
        raise PlanError(f"--workers-per-host {per_host}: --hosts says so already; keep one")
    (per_host,) = slots
    return workers or per_host * len(hosts), per_host
