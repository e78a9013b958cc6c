"""The command line costs nothing until a command is called."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dtk.cli.main import COMMANDS, main
from dtk.version import __version__


def test_help_lists_the_commands_and_the_version_is_told():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert "run " in result.output
    assert CliRunner().invoke(main, ["--version"]).output == f"dtk, version {__version__}\n"


def test_python_m_dtk_is_dtk():
    done = subprocess.run(
        [sys.executable, "-m", "dtk", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (f"dtk, version {__version__}\n", "")


@pytest.mark.parametrize(
    "given, told",
    [
        ("train", "no such command: train\n"),
        ("rum", "no such command: rum, did you mean run?\n"),
        ("instal-horovod", "no such command: instal-horovod, did you mean install-horovod?\n"),
        ("run --hostfil x.py", "no such option: --hostfil, did you mean --hostfile or --hosts?"),
        ("run --np 2 x.py", "no such option: --np, did you mean -n?; see `dtk run --help`"),
        ("run --nproc_per_node 2 x.py", "no such option: --nproc_per_node, did you mean -n?; see"),
        ("check --wokers 2 x.py", "no such option: --wokers, did you mean --workers?; see `dtk"),
        ("tune --no-such x.py", "no such option: --no-such; see `dtk tune --help`"),
        ("bench -w 2", "no such option: -w; see `dtk bench --help`"),
        ("plan --modle x", "no such option: --modle, did you mean --model?; see `dtk plan --help`"),
        ("doctor --host a", "'--hosts'"),  # click's own
    ],
)
def test_what_is_spelled_wrong_is_refused_and_told_as_it_is_spelled(given, told):
    result = CliRunner().invoke(main, given.split())
    assert result.exit_code == 2
    assert told in result.output


def test_a_full_disk_and_a_file_that_cannot_be_had_are_told_in_a_line(monkeypatch):
    plan = ["plan", "--step-time", "1s", "--parameters", "1", "--workers", "1"]
    result = CliRunner().invoke(main, [*plan, "--json", "/dev/full"])
    assert result.exit_code == 1
    assert result.stderr == "dtk plan: what it prints or writes: No space left on device\n"
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    result = CliRunner().invoke(main, ["tune", "--forget", __file__])
    assert result.exit_code == 1
    assert result.stderr.startswith("dtk tune: /dev/null/dtk/")
    assert result.stderr.endswith(": Not a directory\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_listed_is_there(name):
    assert isinstance(main.get_command(click.Context(main), name), click.Command)


COMPLETED = """
complete_at() {
    COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    _dtk_completion dtk 2>/dev/null  # `compopt` wants a terminal
    echo "$* -> ${COMPREPLY[*]}"
}
complete_at dtk do
complete_at dtk run --hostf
complete -p dtk
"""


def test_bash_completes_what_the_documented_line_has_set_up(tmp_path):
    """The line of docs/command-line.md, and then bash's own function for the command."""
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    (line,) = [line for line in page.splitlines() if "bash_source" in line]
    beside = Path(sys.executable).parent
    if shutil.which("dtk", path=str(beside)) is None:
        pytest.skip("no command dtk beside Python")
    environ = {**os.environ, "HOME": str(tmp_path), "PATH": f"{beside}:{os.environ['PATH']}"}

    def bash(script):
        asked = ["bash", "--norc", "-c", script]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, env=environ)
        return done.stdout.splitlines()

    assert bash(line.removeprefix("$ ")) == []
    *completed, function = bash((tmp_path / ".bashrc").read_text() + COMPLETED)
    assert completed == ["dtk do -> doctor", "dtk run --hostf -> --hostfile"]
    assert function == "complete -o nosort -F _dtk_completion dtk"
