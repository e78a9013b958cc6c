"""Commands of the documentation, checked by the parser of the program they name; none is run."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys

from click.testing import CliRunner

from dtk.bench import bench_jobs
from dtk.cli import bench, tune
from dtk.cli.main import main
from dtk.launch import assign, job_options, job_run, ssh

from support.blocks import ROOT, words


class Started(Exception):
    """Raised where a command would begin to work, after all its own checks."""


def checked(command: str, folder: str) -> bool:
    """Check one command; False for one of a program nobody here knows.

    Args:
        command: As in a shell.
        folder: Where it stands; has the files it names.

    Raises:
        AssertionError: It is wrong; with what its program says.
    """
    # what is set for one command stands before it
    first, *rest = [*itertools.dropwhile(re.compile(r"\w+=").match, words(command))] or [""]
    if first in ("mpirun", "srun"):
        return _checked_launched(rest, folder)
    if first == "dtk":
        _check_dtk(rest, folder)
    elif first == "make":
        _check_make(rest)
    elif first == "python" and rest[0] != "train.py":
        _check_script(rest)
    else:
        return False
    return True


def _checked_launched(arguments: list[str], folder: str) -> bool:
    """What a launcher starts; its own options are checked where it is run."""
    for index, word in enumerate(arguments):
        if word in ("python", "dtk"):
            return checked(" ".join(arguments[index:]), folder)
    return False


def _facts(host: str, count: int) -> ssh.HostFacts:
    return ssh.HostFacts(
        ports=tuple(range(20000, 20000 + count)), cores=tuple(range(8)), interface=""
    )


def _check_dtk(arguments: list[str], folder: str) -> None:
    def planned(*given, **named):
        return assign(*given, **{**named, "survey": _facts})

    def start(*given, **named):
        raise Started

    name = arguments[0] if arguments else ""
    scripted = [os.path.join(str(ROOT), word) if _is_ours(word) else word for word in arguments]
    with contextlib.ExitStack() as stack:
        stack.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        for module, attribute, padding_row in (
            (job_run, "assign", planned),
            (job_run, "Job", start),
            (tune, "assign", planned),
            (bench, "BenchRun", start),
            # what a command takes, not what is installed where it is read
            (job_options, "check_installed", lambda name: None),
            (bench_jobs, "check_mpirun", lambda hosts: None),
        ):
            stack.callback(setattr, module, attribute, getattr(module, attribute))
            setattr(module, attribute, padding_row)
        # What says what is here, or builds it, has no arguments worth more than its parser.
        shows = ("config", "doctor", "env", "install-horovod", "plan", "top")
        asked = ["--help"] if name in shows else []
        result = CliRunner().invoke(main, [*scripted, *asked])
    begun = isinstance(result.exception, Started)
    assert begun or result.exit_code == 0, f"dtk {' '.join(arguments)}: {result.output}"


def _is_ours(word: str) -> bool:
    return "/" in word and (ROOT / word).exists()


def _check_make(arguments: list[str]) -> None:
    """Its targets exist; what it would do is printed, and thrown away."""
    options = ["make", "-n", "-C", str(ROOT), *arguments]
    done = subprocess.run(options, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"make {' '.join(arguments)}: {done.stderr}"


def _check_script(arguments: list[str]) -> None:
    """A script of this repository; the options of a benchmark are parsed by itself."""
    script, *options = arguments
    assert (ROOT / script).exists(), f"there is no {script}"
    if script.startswith("benchmarks/"):
        # Options are checked in their order, so that all before --help have been.
        asked = [sys.executable, str(ROOT / script), *options, "--help"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"
