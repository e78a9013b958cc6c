"""`dtk plan`: predict how long a step takes on more workers and on other links."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from dtk.bench import page
from dtk.bench.results import read
from dtk.cli import links, plan_model
from dtk.launch import job_options as jobs
from dtk.planning import quantity, tables
from dtk.planning.advice import TARGET, advise
from dtk.planning.calibration import Calibration, calibrated
from dtk.planning.inputs import Cluster, Job, Software
from dtk.planning.methods import sweep
from dtk.planning.quantity import PlanError

_WORKERS = "1,...,4096"


@click.command(
    "plan",
    cls=jobs.JobCommand,
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
@click.option(
    "--step-time", metavar="TIME", help="Time of a worker's step without sending, e.g. 85ms."
)
@click.option("--parameters", metavar="N", help="Trainable parameters, e.g. 270k.")
@click.option(
    "--batch-size",
    metavar="ROWS",
    help="Rows of that step per worker; with a model to divide, of all workers. Default: 32.",
)
@click.option(
    "--global-batch",
    metavar="ROWS",
    help="Rows of all workers, for any number of them. Default: --batch-size per worker.",
)
@click.option("--workers", default=_WORKERS, show_default=True, help="`...` doubles.")
@click.option("--workers-per-host", metavar="N", help="Default: the benchmark's, or 1.")
@click.option("--bandwidth", metavar="SPEED", help="Between hosts, each way, e.g. 1Gbit/s.")
@click.option("--latency", metavar="TIME", default="0us", help="Between hosts, one way, e.g. 50us.")
@click.option(
    "--host-bandwidth", metavar="SPEED", help="Within a host. Default: the speed of copying."
)
@click.option("--host-latency", metavar="TIME", default="0us", help="Within a host.")
@click.option(
    "--coding", metavar="TIME", help="Time to code a parameter in a few bits, e.g. 8.2ns."
)
@click.option(
    "--block-steps",
    metavar="N",
    default="16",
    help="Steps in a block of block momentum. Default: 16.",
)
@click.option("--servers", metavar="N", default="1", help="Parameter servers. Default: 1.")
@click.option("--price-per-hour", type=float, default=0.0, help="Price of a host, any currency.")
@click.option(
    "--efficiency", type=float, default=TARGET, show_default=True, help="Least efficiency wanted."
)
@click.option("-n", "processes", metavar="N", help="Workers that a model is divided among.")
@jobs.hosts
@click.option("--memory", metavar="BYTES", help="Memory of a worker, to divide a model, e.g. 8GB.")
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
    step_time: str | None,
    parameters: str | None,
    batch_size: str | None,
    global_batch: str | None,
    workers: str,
    workers_per_host: str | None,
    bandwidth: str | None,
    latency: str,
    host_bandwidth: str | None,
    host_latency: str,
    coding: str | None,
    block_steps: str,
    servers: str,
    price_per_hour: float,
    efficiency: float,
    processes: str | None,
    hosts: str | None,
    memory: str | None,
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
    if model is not None and plan_model.is_model(model):
        plan_model.check_options()
        place = plan_model.Place(
            processes, hosts, workers_per_host, bandwidth, latency, host_bandwidth, host_latency
        )
        calibration = plan_model.Source(bench, communicator, not no_measure)
        plan_model.plan(model, place, calibration, batch_size, memory, json_file)
        return
    plan_model.check_no_model(processes, hosts, memory, no_measure)
    _check_target(efficiency)
    counts = quantity.counts("--workers", workers)
    if bench is None:
        _check_alone(model, communicator)
        known = _given(step_time, parameters, batch_size)
    else:
        other = step_time is not None and parameters is not None
        if not other:
            _check_bench(bench, step_time, parameters, batch_size)
        known = calibrated(read(bench), model, communicator)
        if other:
            known = _another(known, _given(step_time, parameters, batch_size))
    per_host = known.per_host
    if workers_per_host is not None:
        per_host = quantity.count("--workers-per-host", workers_per_host)
    job = dataclasses.replace(
        known.job,
        global_batch=None
        if global_batch is None
        else quantity.count("--global-batch", global_batch),
        block_steps=quantity.count("--block-steps", block_steps),
    )
    cluster = Cluster(
        network=links.network(known.hosts, per_host, counts, bandwidth, latency),
        host=links.link("--host-bandwidth", host_bandwidth, "--host-latency", host_latency),
        per_host=per_host,
        servers=quantity.count("--servers", servers),
        price=price_per_hour,
        software=_software(known.software, coding),
    )
    predictions = sweep(job, cluster, counts)
    advice = advise(predictions, job, cluster, efficiency)
    if plot is not None:
        tables.draw(predictions, plot)
    for option, file, write in (
        ("--json", json_file, tables.dumps),
        ("--markdown", markdown_file, tables.markdown),
    ):
        if file is not None:
            _write(option, file, write(predictions, job, cluster, advice))
    page.show(tables.by_title(predictions).items(), tables.notes(job, cluster, advice))


def _check_target(efficiency: float) -> None:
    if not 0 < efficiency <= 1:
        raise PlanError(f"--efficiency {efficiency:g}: expected above 0 and at most 1, such as 0.7")


def _check_bench(bench: str, *given: str | None) -> None:
    """Raise PlanError if numbers were given that the benchmark has, too."""
    for option, text in zip(("--step-time", "--parameters", "--batch-size"), given, strict=True):
        if text is not None:
            raise PlanError(
                f"{option} {text}: {bench} says so already; leave it out, or give --step-time and "
                "--parameters for another model over what sends there"
            )


def _check_alone(*given: str | None) -> None:
    """Raise PlanError if options choose from a benchmark, but there is none."""
    for option, name in zip(("--model", "--communicator"), given, strict=True):
        if name is not None:
            raise PlanError(f"{option} {name} chooses from a benchmark; give its file with --bench")


def _given(step_time: str | None, parameters: str | None, batch_size: str | None) -> Calibration:
    """Return a calibration from the command line instead of a benchmark."""
    if step_time is None or parameters is None:
        raise PlanError(
            "how long does a step take, of what? Give --bench and what `dtk bench --json` wrote, "
            "or --step-time and --parameters"
        )
    rows = Job.rows if batch_size is None else quantity.count("--batch-size", batch_size)
    seconds = quantity.seconds("--step-time", step_time)
    job = Job(seconds, quantity.count("--parameters", parameters), rows)
    return Calibration(job, Software(), per_host=1, hosts=1)


def _another(measured: Calibration, given: Calibration) -> Calibration:
    """Return a benchmark's costs of sending for a model that it did not measure."""
    software = dataclasses.replace(measured.software, product=0.0, hidden=0.0)
    return dataclasses.replace(measured, job=given.job, software=software)


def _software(software: Software, coding: str | None) -> Software:
    if coding is None:
        return software
    seconds = dict.fromkeys(("8bit", "1bit"), quantity.seconds("--coding", coding))
    return dataclasses.replace(software, coding={**software.coding, **seconds})


def _write(option: str, file: str, text: str) -> None:
    try:
        Path(file).write_text(text)
    except OSError as error:
        raise PlanError(f"{option} {file}: cannot be written: {error.strerror}") from None
