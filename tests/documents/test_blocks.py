"""Every fenced block of the documentation is run or checked, see `entries`."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from documents import checking, preambles, running
from documents.entries import ENTRIES, Printed, Python, Shell
from support.blocks import ROOT, all_blocks, commands
from support.launched import dtk_run

pytestmark = pytest.mark.command

BLOCKS = all_blocks()


def entry_of(block):
    """The key and the entry of a block; None for a block of shell that is parsed only."""
    found = [
        (key, entry)
        for key, entry in ENTRIES.items()
        if key[0] == block.file and block.text.startswith(key[1])
    ]
    if not found and block.language == "sh":
        return None
    assert len(found) == 1, (
        f"{block} ({block.text.splitlines()[0]!r}) has {len(found)} entries in "
        "tests/documents/entries.py, expected one: say there how it is run"
    )
    return found[0]


def with_entries(kind):
    """The blocks whose entries are of a kind, as pytest's parameters."""
    return [
        pytest.param(block, entry, id=f"{block.file} {key[1].strip()}")
        for block in BLOCKS
        for key, entry in ENTRIES.items()
        if isinstance(entry, kind) and key[0] == block.file and block.text.startswith(key[1])
    ]


def block_starting(start):
    (found,) = [block for block in BLOCKS if block.text.startswith(start)]
    return found.text


@pytest.fixture
def folder(tmp_path):
    """Where commands are run: train.py and job.toml are there; python is this one."""
    (tmp_path / "train.py").write_text(preambles.TRAIN)
    (tmp_path / "job.toml").write_text(preambles.JOB)
    return tmp_path


def run(script, folder):
    """Run a script by bash; returns its standard output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    root["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, **root},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_script_trains_on_two_ranks(tmp_path):
    """Each rank drew data of its own, before there was a strategy: `dtk run` refused it."""
    (tmp_path / "train.py").write_text(block_starting("import dtk  # 1"))
    done = dtk_run("-n", 2, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "epoch 3/3" in done.stdout.lower()


def test_every_block_has_an_entry_and_every_entry_a_block():
    keys = [found[0] for block in BLOCKS if (found := entry_of(block))]
    assert sorted(keys) == sorted(ENTRIES), "an entry has no block, or two blocks have one entry"


def test_blocks_say_their_language():
    kinds = {"text", "console", "python", "toml"}
    languages = {Python: {"python"}, Shell: {"sh"}, Printed: kinds}
    for block in BLOCKS:
        found = entry_of(block)
        assert found is None or block.language in languages[type(found[1])], block


@pytest.mark.full_for(
    *("*docs/callbacks.md *", "*docs/search.md *", "*docs/tutorials/notebook.md *"),
    why="callbacks and trials are trained by many tests",
)
@pytest.mark.parametrize("block, entry", with_entries(Python))
@pytest.mark.parametrize("backend, size", [("local", 1)])
def test_python_runs(world, backend, size, block, entry):
    before = preambles.PREAMBLES[entry.before]
    world(backend, size).run(running.executed, before, block.text, entry.after, timeout=120)


@pytest.mark.parametrize("block, entry", with_entries(Shell))
def test_shell_runs(folder, block, entry):
    if entry.needs and shutil.which(entry.needs) is None:
        pytest.skip(f"{entry.needs} is not installed")
    for name in entry.files:
        preambles.FILES[name](folder)
    script = block.text
    if entry.only:
        script = "\n".join(line for line in commands(script) if line.startswith(entry.only))
        assert script
    for there, here in entry.instead:
        assert there in script
        script = script.replace(there, here)
    printed = run(script, folder)
    assert [said for said in entry.prints if said not in printed] == [], printed


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sh"], ids=str)
def test_commands_are_what_their_programs_take(folder, block):
    script = re.sub(r"<[^>\n]*>", "placeholder", block.text)
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, done.stderr
    known = [command for command in commands(script) if checking.checked(command, str(folder))]
    assert known or "train.py" in script or "_suite" in script, f"{block}: unknown"


@pytest.mark.parametrize("block, entry", with_entries(Printed))
def test_tests_that_are_referred_to_exist(block, entry):
    file, _, name = entry.by.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


# What programs print.


@pytest.mark.parametrize("backend, size", [("collective", 2)])
def test_what_describe_prints(world, backend, size):
    code = block_starting("dtk.data.describe(")
    first, second = world(backend, size).run(
        running.executed, preambles.PREAMBLES["digits"], code, timeout=120
    )
    shown = block_starting("data: arrays of 1000 rows")
    assert re.sub(r"on \S+:", "on node:", first.strip()) == re.sub(r"on \S+:", "on node:", shown)
    assert second == ""


def test_what_doctor_says_under_mpirun(folder):
    """Breaks as lines of 80 columns in colour: mpirun gives every rank a terminal."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    prompt, *shown = block_starting("$ mpirun -np 2 dtk doctor").splitlines()
    (folder / "doctor.py").write_text(preambles.DOCTOR)
    command = prompt.removeprefix("$ ").replace("dtk doctor", "python doctor.py")
    printed = run(command, folder).splitlines()
    assert sorted(line.strip() for line in printed) == shown


def test_the_layers_are_those_that_are_held():
    rooms = configparser.ConfigParser()
    rooms.read(ROOT / ".importlinter")
    held = rooms["importlinter:contract:rooms"]["layers"].split("\n")
    shown = [set(line.split()) for line in block_starting("cli").splitlines()]
    assert shown == [set(line.split(" | ")) for line in held if line]
    found = (ROOT / "dtk").glob("[!_]*")
    packages = {path.stem for path in found if path.is_dir() or path.suffix == ".py"}
    assert packages == set().union(*shown)
