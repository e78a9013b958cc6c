"""Options of `dtk run` from files: which one wins, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dtk.cli.main import main
from dtk.cli.run import run
from dtk.launch import job_file

from support.blocks import all_blocks

pytestmark = pytest.mark.command

DTK = [sys.executable, "-m", "dtk.cli.main"]
PRINTED = """
import os
print(*[os.environ[f"DTK_{name}"] for name in ("COMMUNICATOR", "STALL_TIMEOUT", "SAVE_GRACE")])
"""


def dtk(*arguments, **environ):
    names = ("DTK_COMMUNICATOR", "DTK_STALL_TIMEOUT", "DTK_SAVE_GRACE")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    env = {**kept, **environ}
    return subprocess.run([*DTK, *arguments], capture_output=True, text=True, timeout=60, env=env)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PRINTED)


def test_the_command_line_wins_over_variables_over_the_file_over_pyproject():
    Path("pyproject.toml").write_text(
        '[tool.dtk.run]\nworkers = 3\nhosts = "nowhere:3"\ncommunicator = "collective"\n'
        "stall-timeout = 50\nsave-grace = 5\n"
    )
    Path("job.toml").write_text("workers = 4\nstall-timeout = 60\nsave-grace = 6\n")
    Path("hosts").write_text("localhost slots=2\n")
    arguments = ("-n", "2", "--hostfile", "hosts", "--config", "job.toml", "train.py")
    done = dtk("run", *arguments, DTK_SAVE_GRACE="7")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] collective 60 7" for rank in "01"]
    told = "dtk run: pyproject.toml gives communicator = collective"
    assert done.stderr == f"{told}; job.toml gives stall-timeout = 60.0\n"


def test_a_variable_wins_over_the_communicator_of_a_file_and_home_is_known(tmp_path):
    Path("pyproject.toml").write_text(
        '[tool.dtk.run]\nworkers = 1\ncommunicator = "horovod"\noutput-dir = "~/logs"\n'
    )
    variables = {"DTK_COMMUNICATOR": "collective", "HOME": str(tmp_path)}
    done = dtk("run", "--events=~/events", "train.py", **variables)
    assert done.stdout == "[0] collective 300 60\n", done.stderr
    assert Path("events").exists() and [*Path("logs").iterdir()]


def test_an_empty_path_is_none():
    """Files of ranks came to lie where the job was started."""
    done = dtk("run", "-n", "1", "--output-dir=", "train.py")
    assert done.returncode == 0, done.stderr
    assert os.listdir() == ["train.py"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("5m", "'--stall-timeout': '5m' is not a valid float (by DTK_STALL_TIMEOUT); see"),
        ("0.5", "--stall-timeout (by DTK_STALL_TIMEOUT) 0.5: expected 1 to 1000000 seconds, or 0"),
    ],
)
def test_a_wrong_value_of_a_variable_names_it(value, told):
    """The user had typed no such option."""
    done = dtk("run", "-n", "1", "train.py", DTK_STALL_TIMEOUT=value)
    assert done.returncode == 2 and told in done.stderr


TABLE = "[tool.dtk.run]\n"


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("job.toml", "workrs = 2", "job.toml: unknown name workrs, did you mean workers?"),
        ("job.toml", "config = 'a'", "job.toml: unknown name config, expected one of workers, ps,"),
        ("job.toml", "workers = '2'", "job.toml: workers = '2': expected a whole number"),
        ("job.toml", "workers = true", "job.toml: workers = True: expected a whole number"),
        ("job.toml", "bind = 'no'", "job.toml: bind = 'no': expected true or false"),
        ("job.toml", "hosts = 2", "job.toml: hosts = 2: expected a string"),
        ("job.toml", "workers = 0", "-n 0: expected 1 or more, e.g. `dtk run -n 2 train.py`; job"),
        ("job.toml", "workers =", "job.toml is not TOML: Invalid value (at"),
        ("pyproject.toml", f"{TABLE}pss = 1", "pyproject.toml: unknown name pss, did you mean ps?"),
        ("pyproject.toml", "[tool.dtk.rum]", "pyproject.toml: unknown name rum, did you mean run?"),
        ("pyproject.toml", f"{TABLE}ps = -1\nworkers = 1", "dtk run: --ps -1: expected 0 or more,"),
    ],
)
def test_what_is_wrong_in_a_file_is_refused_with_its_name(file, text, told):
    Path(file).write_text(text)
    option = [] if file == "pyproject.toml" else ["--config", file]
    done = CliRunner().invoke(main, ["run", *option, "train.py"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert told in done.stderr and file in done.stderr


def test_other_tables_of_a_pyproject_are_left_alone():
    Path("pyproject.toml").write_text("[tool.other]\nworkers = 'x'\n")
    assert job_file.read("pyproject.toml", run) == {}


def test_config_asks_and_writes_what_the_documentation_shows():
    answers = "node1:2,node2:2\n\n\n\n3\nlogs\n"
    done = CliRunner().invoke(main, ["config"], input=answers)
    assert done.exit_code == 0, done.output
    (shown,) = [block.text for block in all_blocks() if block.language == "toml"]
    assert Path("job.toml").read_text() == shown + "\n"
    assert job_file.read("job.toml", run)["workers"] == 4
    assert CliRunner().invoke(main, ["config"], input="n\n").exit_code == 1
    assert Path("job.toml").read_text() == shown + "\n"
    done = CliRunner().invoke(main, ["config", "--output", "b.toml"], input="a:2\n3\n\n\n")
    assert done.exit_code == 2 and "a:2 have 2 slots" in done.stderr
    assert not Path("b.toml").exists()
    # All questions were asked, and then it failed.
    done = CliRunner().invoke(main, ["config", "--output", "no/b.toml"], input=answers)
    assert done.exit_code == 2 and "--output no/b.toml: there is no directory no" in done.stderr
    done = CliRunner().invoke(main, ["config", "--output", "c.toml"], input="\n\n\n\n-1\n3\n\n")
    assert "-1 is not in the range" in done.output
    assert "max-restarts = 3" in Path("c.toml").read_text()


def test_env_tells_versions_and_where_settings_come_from():
    Path("pyproject.toml").write_text(f"{TABLE}workers = 2\n")
    told = json.loads(dtk("env", "--json", DTK_JOB_SECRET="private", TF_VAR_KEY="private").stdout)
    assert told["tensorflow"].startswith("tensorflow") and told["Python"].startswith("3.")
    assert told["run workers"] == "2 (pyproject.toml)"
    assert told["DTK_JOB_SECRET"] == "hidden (environment)"
    assert "private" not in str(told)
