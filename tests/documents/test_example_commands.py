"""Runs every command that README.md and the examples print, on less data where SMALLER says so."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from documents.blocks import ROOT
from world import missing

EXAMPLES = ROOT / "examples"

# What makes a script short, appended to the command as printed. `--data` and `--synthetic` stand in
# for images that must be downloaded.
SMALLER = {
    "custom_loop.py": "--epochs 2",
    "dcgan.py": "--data digits --images 32 --epochs 1 --batch-size 16",
    "digits_allreduce.py": "--epochs 2",
    "digits_horovod_mpirun.py": "--epochs 2",
    "digits_mirrored.py": "--epochs 2",
    "digits_parameter_server.py": "--epochs 2",
    "digits_showcase.py": "--epochs 2",
    "distill_digits.py": "--epochs 2 --calls 3",
    "embedding_parameter_server.py": "--epochs 1 --buckets 400000",
    "export_digits.py": "--epochs 2 --calls 3",
    "linear_regression_ps.py": "--steps 200",
    "mobilenet_inference.py": "--synthetic --images 64 --test-images 32 --weights none --calls 3",
    "model_parallel.py": "--epochs 1",
    "pipeline_mlp.py": "--epochs 1",
    "predict_to_disk.py": "--rows 20000 --epochs 1",
    "search_digits.py": "--epochs 2 --trials 2",
    "spatial_unet.py": "--images 8 --epochs 1",
    "train.py": "--data digits --images 64 --epochs 1 --test-at-end",
    "vgg16_channel_parallel.py": "--data digits --steps 2 --batch-size 8",
}


def printed_commands():
    """The commands of README's table of examples, and of the docstrings, without their comments."""
    readme = re.findall(r"^\|.*\| `([^`]*examples/\S+\.py[^`]*)` \|$", _readme(), re.MULTILINE)
    found = dict.fromkeys(readme)
    for script in sorted(EXAMPLES.rglob("*.py")):
        said = ast.get_docstring(ast.parse(script.read_text())) or ""
        lines = [line.partition("   #")[0].strip() for line in said.splitlines()]
        found |= dict.fromkeys(line for line in lines if "examples/" in line and ".py" in line)
    return list(found)


def _readme():
    return (ROOT / "README.md").read_text()


def _script_of(command):
    (script,) = re.findall(r"examples/(?:\w+/)*(\w+\.py)", command)
    return script


def test_each_script_says_how_it_is_run():
    run = {_script_of(command) for command in printed_commands()}
    parts = {path.name for path in (EXAMPLES / "cifar10").glob("*.py")} - {*SMALLER}
    assert run == {*SMALLER} == {path.name for path in EXAMPLES.rglob("*.py")} - parts


@pytest.mark.full
@pytest.mark.parametrize("command", printed_commands())
def test_a_printed_command_runs(command, tmp_path):
    """Breaks as `dcgan.py`, which ended in a refusal where it ran as README started it."""
    program, *arguments = [*shlex.split(command), *shlex.split(SMALLER[_script_of(command)])]
    if program == "mpirun" and (reason := missing("horovod-mpi")):
        pytest.skip(reason)
    as_root = ["--allow-run-as-root", "--oversubscribe"]  # which root needs, and two cores
    ways = {
        "dtk": [sys.executable, "-m", "dtk.cli.main"],
        "python": [sys.executable],
        "mpirun": ["/usr/bin/mpirun", *as_root],
    }
    here = [str(ROOT / a) if a.startswith("examples/") else a for a in arguments]
    here = [sys.executable if a == "python" else a for a in here]
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*ways[program], *here], capture_output=True, text=True, timeout=280, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert not re.search(r"\bnan\b", done.stdout), done.stdout
