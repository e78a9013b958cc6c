"""A run of worlds, from start to end."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from dtk.bench import runner
from dtk.bench.process_world import command
from dtk.bench.results import read
from dtk.bench.setting import Setting
from dtk.cli.main import main
from dtk.launch import job_processes


@pytest.fixture
def heard_again():
    """Leave signals to whoever had them, as `interruptible` does not: it expects an exit."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def played(monkeypatch):
    """Worlds that need no library."""
    path = os.pathsep.join([str(Path(__file__).parent), os.getcwd()])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(runner, "command", lambda *_: command("bench_worker", {}))


def test_an_interrupt_ends_every_world_at_once(heard_again, played, capfd):
    run = runner.Run(Setting(models=(), allreduce=(4000,)), workers=2)
    # They have been asked by then, and do not answer.
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    assert run.measure(("collective", "collective"), ()) == 128 + signal.SIGINT
    assert time.monotonic() - began < 20
    assert "dtk bench: SIGINT: every process was ended" in capfd.readouterr().err
    assert [world.name for world in run.worlds] == ["collective"] * 2
    assert [job_processes.members(world.job.job_id) for world in run.worlds] == [[], []]


def test_what_was_measured_before_an_interrupt_is_shown_and_saved(heard_again, played, tmp_path):
    # Of the second size nothing is ever measured: its worlds do not answer.
    sizes = ["--communicator", "collective", "--allreduce", "8kB", "--allreduce", "4kB"]
    file = tmp_path / "run.json"
    threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    done = CliRunner().invoke(main, ["bench", *sizes, "--rounds", "3", "--json", str(file)])
    assert done.exit_code == 128 + signal.SIGINT
    assert "all-reduce of 8.00 kB" in done.output and "all-reduce of 4.00 kB" not in done.output
    assert "Not measured: allreduce 4000: ended with exit code 130." in done.output
    assert {name: len(taken) for name, taken in read(file).turns["allreduce 8000"].items()} == {
        "collective wait": 3
    }


def test_what_is_tuned_is_measured_beside_with_its_variable(played, tmp_path, monkeypatch):
    monkeypatch.delenv("OF_MINE", raising=False)
    file = tmp_path / "run.json"
    given = ["--communicator", "collective", "--allreduce", "12kB", "--tuned", "OF_MINE=3"]
    done = CliRunner().invoke(main, ["bench", *given, "--rounds", "1", "--json", str(file)])
    assert done.exit_code == 0, done.output
    found = read(file)
    sent = {name: taken[0][0].sent for name, taken in found.turns["allreduce 12000"].items()}
    assert sent == {"collective mine": 0, "tuned collective mine": 3}
    assert found.setting["tuned"] == ["OF_MINE=3"]
    assert "tuned: under OF_MINE=3." in done.output


def test_how_long_it_will_take_is_said_once_and_not_of_seconds(capfd, monkeypatch):
    now = iter([0.0, 0.0, 60.0, 61.0, 62.0])
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(now))
    screen = runner.Screen()
    for taken in (0, 1, 2, 3):
        screen.show("mlp", taken, 10)
    assert capfd.readouterr().err == "dtk bench: about 9.0 minutes more\n"
    now = iter([0.0, 0.0, 1.0, 2.0])
    short = runner.Screen()
    for taken in (0, 1, 2):
        short.show("mlp", taken, 10)
    assert capfd.readouterr().err == ""
