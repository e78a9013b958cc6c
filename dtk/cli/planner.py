"""`dtk plan`: predict how long a step takes on more workers and on other links."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from dtk.bench import page
from dtk.bench.results import read
from dtk.errors import check_writable
from dtk.launch import job_options as jobs
from dtk.planning import inputs, tables
from dtk.planning.calibration import Calibration, calibrated
from dtk.planning.inputs import Cluster, Link, PlanError, Software, Training
from dtk.planning.plan_methods import sweep


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


@click.command(
    "plan",
    cls=jobs.JobCommand,
    context_settings={"show_default": True},
    epilog="""
    \b
    dtk bench --model resnet20 --json bench.json
    dtk plan --bench bench.json --bandwidth 1Gbit/s --latency 50us
    dtk plan --step-time 85ms --parameters 270k --bandwidth 1Gbit/s --workers 1,...,64
    """,
)
@click.option("--bench", metavar="FILE", help="Calibrate with what `dtk bench --json` wrote.")
@click.option("--model", metavar="NAME", help="Model in that file, if there are several.")
@click.option(
    "--communicator", metavar="NAME", help="Communicator in that file, if there are several."
)
@click.option("--step-time", type=_STEP, help="Time of a worker's step without sending, e.g. 85ms.")
@click.option("--parameters", type=_COUNT, help="Trainable parameters, e.g. 270k.")
@click.option(
    "--batch-size",
    type=_ROWS,
    help="Rows of that step per worker. Default: 32.",
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
    json_file: str | None,
    markdown_file: str | None,
    plot: str | None,
) -> None:
    """Predict time, efficiency and cost on up to thousands of workers.

    Predictions for each strategy and exchange follow from one step, measured or given, and the
    links between hosts. If you give a step and --bench, the costs of messages and bytes come from
    the benchmark. Nothing is run. docs/command-line.md has the formulas, the errors of past
    predictions, and when not to trust them.
    """
    check_writable({"--json": json_file, "--markdown": markdown_file, "--plot": plot})
    for option, name in {"--model": model, "--communicator": communicator}.items():
        if bench is None and name is not None:
            raise PlanError(f"{option} {name} chooses from a benchmark; give its file with --bench")
    within = Link(host_latency, host_bandwidth or math.inf)
    training = None
    if step_time is not None and parameters is not None:
        training = Training(step_time, parameters, batch_size or Training.rows)
    if bench is None:
        if training is None:
            raise PlanError(
                "how long does a step take, of what? Give --bench and what `dtk bench --json` "
                "wrote, or --step-time and --parameters"
            )
        known = Calibration(training, Software(), per_host=1, hosts=1)
    else:
        if training is None:
            _refuse(
                "--step-time --parameters --batch-size",
                f"was given, and {bench} says so already; leave it out, or give --step-time and "
                "--parameters for another model over what sends there",
            )
        known = calibrated(read(bench), model, communicator)
        if training is not None:
            # The costs of sending, for a model that was not measured.
            software = dataclasses.replace(known.software, product=0.0, hidden=0.0)
            known = dataclasses.replace(known, job=training, software=software)
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
        is_given = context.get_parameter_source(one.name or "") is not ParameterSource.DEFAULT
        if is_given and one.opts[0] in options.split():
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
