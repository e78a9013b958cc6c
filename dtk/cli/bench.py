"""`dtk bench`: the speed of training on several workers, against workers that send nothing."""

from __future__ import annotations

import sys
from typing import TypeVar

import click

from dtk.bench import bench_jobs, page, report, results
from dtk.bench.results import BenchError, Setting
from dtk.bench.turns import BenchRun
from dtk.cluster import Host
from dtk.errors import ClusterError, check_writable
from dtk.launch import job_options

_T = TypeVar("_T")
_WORKERS, _MANY = 2, click.IntRange(min=1)
_BASELINES = bench_jobs.find()
_PEER_HELP = (
    "Another framework to measure: "
    + "; ".join(f"{name}, {baseline.about}" for name, baseline in _BASELINES.items())
    + ". May be repeated; a missing one is installed in a separate environment, which other hosts "
    "must have at the same path."
    if _BASELINES
    else "Another framework to measure; needs a clone of dtk's repository, and `pip install -e "
    "'.[bench]'` there."
)


@click.command(
    "bench",
    cls=job_options.JobCommand,
    context_settings={"show_default": True},
    epilog="""
    \b
    dtk bench --model mlp --exchange none --exchange 1bit
    dtk bench --json before.json
    dtk bench --compare before.json
    dtk bench --hosts node1:1,node2:1 --markdown bench.md
    dtk bench --model mlp --communicator collective --communicator horovod --peer torch
    dtk bench --allreduce 4kB --allreduce 100MB --communicator horovod --peer mpi4py
    """,
)
@click.option(
    "-n", "--workers", type=int, help=f"Workers. Default: the slots of the hosts, or {_WORKERS}."
)
@click.option(
    "--communicator",
    "communicators",
    metavar="NAME",
    multiple=True,
    help=f"One of {', '.join(bench_jobs.LAUNCHERS)}; may be repeated. Default: what `dtk run` "
    "takes.",
)
@job_options.hosts
@job_options.hostfile
@job_options.remote_shell
@click.option(
    "--model",
    "models",
    metavar="NAME",
    multiple=True,
    help=f"One of {', '.join(results.MODELS)}; may be repeated. Default: all, without --allreduce.",
)
@click.option(
    "--allreduce",
    metavar="SIZE",
    multiple=True,
    help="Measure the sum of one tensor of so many bytes, such as 4kB or 100MB; may be repeated.",
)
@click.option(
    "--exchange",
    "exchanges",
    metavar="NAME",
    multiple=True,
    default=Setting.exchanges,
    help=f"One of {', '.join(results.EXCHANGES)}, or {results.BLOCK}: block momentum, with so many "
    "rows of all workers in a block; a turn of it is of whole blocks, of --steps steps or more. "
    "May be repeated.",
)
@click.option(
    "--shard-optimizer",
    is_flag=True,
    help="Train with Adam, and measure dtk a second time with a part of Adam's slots on each "
    "worker, by AllReduceStrategy(shard_optimizer=True).",
)
@click.option("--peer", "peers", metavar="NAME", multiple=True, help=_PEER_HELP)
@click.option(
    "--tuned",
    metavar="NAME=VALUE",
    multiple=True,
    help="Measure the limit and dtk a second time with this variable set, such as one that `dtk "
    "tune` prints; may be repeated.",
)
@click.option("--batch-size", type=_MANY, default=Setting.batch_size, help="Rows per worker.")
@click.option("--steps", type=_MANY, default=Setting.steps, help="Steps of a turn.")
@click.option("--rounds", type=_MANY, default=Setting.rounds, help="Turns of each.")
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    help="Write all samples there, and what `dtk plan` needs.",
)
@click.option("--markdown", "markdown_file", metavar="FILE", help="Write the tables there.")
@click.option("--plot", "plot_file", metavar="FILE", help="Draw the ratios there, .svg or .png.")
@click.option("--compare", metavar="FILE", help="Compare with a run saved with --json.")
def bench(
    workers: int | None,
    communicators: tuple[str, ...],
    hosts: str | None,
    hostfile: str | None,
    remote_shell: str,
    models: tuple[str, ...],
    allreduce: tuple[str, ...],
    exchanges: tuple[str, ...],
    shard_optimizer: bool,
    peers: tuple[str, ...],
    tuned: tuple[str, ...],
    batch_size: int,
    steps: int,
    rounds: int,
    json_file: str | None,
    markdown_file: str | None,
    plot_file: str | None,
    compare: str | None,
) -> None:
    """Measure training on several workers.

    The limit is the speed of workers that train with plain Keras at the same time and send nothing.
    The limit, `fit` under dtk with each communicator and exchange, and each peer take turns, so
    that other load on the machine affects all alike. The table has medians and quartiles. If the
    benchmark ends early, it shows the complete rounds and exits with the code of the failure.

    Times are per step, without the work that `fit` does once per epoch (the samples include it).
    """
    models = _once(models) or (() if allreduce else results.MODELS)
    sizes = tuple(map(results.parse_size, allreduce))
    if json_file is not None and models:
        sizes += results.TELLING
    setting = Setting(
        models, _once(exchanges), batch_size, steps, rounds, _once(sizes), shard_optimizer
    )
    where = job_options.places(hosts, hostfile)
    count = _count(workers, where)
    for name in setting.exchanges:
        setting.steps_with(name, count)
    communicators = _once(communicators) or (job_options.installed()[0],)
    chosen = bench_jobs.choose(_once(peers), _BASELINES)
    saved = None if compare is None else results.read(compare)
    check_writable({"--json": json_file, "--markdown": markdown_file, "--plot": plot_file})
    for name in communicators:
        bench_jobs.check(name, where)
    if plot_file is not None:
        report.check_plot(plot_file)
    places = bench_jobs.Places(count, where, remote_shell)
    run = BenchRun(setting, places, dict(map(_variable, tuned)))
    code = run.measure(communicators, chosen)
    outcome = run.results
    if code:
        outcome = outcome.ended_early(setting.tasks, f"ended with exit code {code}")
        if not outcome.turns:
            sys.exit(code)
    if json_file is not None:
        outcome.save(json_file)
    if plot_file is not None:
        report.save_plot(outcome, plot_file)
    page.show(report.tables(outcome, saved), report.notes(outcome, saved), markdown_file)
    sys.exit(code)


def _once(values: tuple[_T, ...]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(values))


def _variable(assignment: str) -> tuple[str, str]:
    name, sign, value = assignment.partition("=")
    if not sign or not name.isidentifier():
        raise BenchError(
            f"--tuned {assignment}: expected NAME=VALUE, for example TF_ENABLE_ONEDNN_OPTS=1"
        )
    return name, value


def _count(workers: int | None, where: tuple[Host, ...]) -> int:
    count = workers
    if count is None:
        count = sum(host.slots for host in where) or _WORKERS
    if count < 1:
        raise ClusterError(f"-n {count}: expected 2 or more, e.g. `dtk bench -n 2`")
    if count == 1:
        raise ClusterError(
            "1 worker has nobody to send to: the limit is all there is, and a ratio of 1; use -n 2 "
            "or more"
        )
    return count
