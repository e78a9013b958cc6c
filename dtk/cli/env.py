"""`dtk env`: what a bug report needs, without importing TensorFlow."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys

import click
import psutil

from dtk.cli import doctor
from dtk.cli.run import run
from dtk.cluster.variables import JOB_SECRET
from dtk.launch import job_file

_MODULES = ("tensorflow", "keras", "numpy", "horovod", "mpi4py", "msgpack", "optuna", "h5py")
# No others: a report must show no secret, such as Terraform's TF_VAR_ variables.
_VARIABLES = re.compile(
    "(DTK|KERAS|XLA|CUDA|NCCL|HOROVOD|OMPI_MCA|OMP|TF_(CONFIG|CPP|ENABLE|GPU|NUM|XLA))(_|$)"
)


@click.command("env")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def env(as_json: bool) -> None:
    """Print versions, platform and settings, with where each setting comes from.

    `dtk doctor` also tries what is installed, and says what to do.
    """
    findings = [doctor.own_install(), *here(), *versions(), *settings()]
    if as_json:
        click.echo(json.dumps({one.what: one.found for one in findings}, indent=2))
    else:
        doctor.show(findings)


def here() -> list[doctor.Finding]:
    """Return what is known of this machine and this process."""
    return [
        doctor.Finding("Python", f"{platform.python_version()} ({sys.executable})"),
        doctor.Finding("Platform", platform.platform()),
        doctor.cores(),
        doctor.mpirun(),
        doctor.joined_by(),
        *doctor.environment()[1],
    ]


def versions() -> list[doctor.Finding]:
    """Return the distribution and version of each package that matters."""
    owners = importlib.metadata.packages_distributions()

    def told(module: str) -> str:
        names = sorted(set(owners.get(module, ())))
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)

    return [doctor.Finding(one, told(one) or "not installed") for one in _MODULES]


def settings() -> list[doctor.Finding]:
    """Return the variables that this process was started with, and what a pyproject.toml gives."""
    findings = [
        doctor.Finding(name, f"{'hidden' if name == JOB_SECRET else value} (environment)")
        for name, value in sorted(psutil.Process().environ().items())
        if _VARIABLES.match(name)
    ]
    if os.path.exists(job_file.PYPROJECT):
        options = job_file.read(job_file.PYPROJECT, run)
        findings += [
            doctor.Finding(f"run {name}", f"{value} ({job_file.PYPROJECT})")
            for name, value in options.items()
        ]
    return findings
