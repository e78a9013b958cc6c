"""`dtk config`: ask for the options of a job, and write them for `dtk run --config`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dtk.errors import check_writable
from dtk.launch import COMMUNICATORS, check_plan, job_options


@click.command("config", cls=job_options.JobCommand)
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(),
    default="job.toml",
    show_default=True,
    help="File to write.",
)
def config(output: str) -> None:
    """Ask for the options of a job and write them to a file for `dtk run --config`."""
    check_writable({"--output": output})
    if Path(output).exists():
        click.confirm(f"{output} is already there. Replace it?", abort=True)
    hosts: str = click.prompt(
        "Hosts and processes on each, as node1:2,node2:2; empty for this machine",
        default="",
        show_default=False,
    )
    where = job_options.places(hosts or None, None)
    workers: int = click.prompt(
        "Processes that train", default=sum(host.slots for host in where) or 2
    )
    communicator: str = click.prompt(
        "What moves the bytes", default="auto", type=click.Choice(COMMUNICATORS)
    )
    servers: int = click.prompt("Parameter servers", default=0)
    check_plan(["train.py"], workers, where, communicator, servers)
    restarts: int = click.prompt(
        "Times to start a job again that fails", default=0, type=click.IntRange(0)
    )
    folder: str = click.prompt(
        "Folder for a file of each rank's output; empty for none", default="", show_default=False
    )
    answers = {
        "hosts": hosts,
        "workers": workers,
        "communicator": communicator.replace("auto", ""),
        "ps": servers,
        "max-restarts": restarts,
        "output-dir": folder,
    }
    lines = [f"{name} = {json.dumps(one)}\n" for name, one in answers.items() if one]
    Path(output).write_text("".join(lines), encoding="utf-8")
    click.echo(f"{output} is written. Next: dtk run --config {output} train.py")
