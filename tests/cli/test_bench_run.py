"""A run of worlds, from start to end."""

import os
import re
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
from dtk.launch import agent


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
    assert [agent.members(world.job.job_id) for world in run.worlds] == [[], []]


def test_what_was_measured_before_an_interrupt_is_shown_and_saved(heard_again, played, tmp_path):
    # Of the second size nothing is ever measured: its worlds do not answer.
    sizes = ["--allreduce", "8kB", "--allreduce", "4kB"]
    file = tmp_path / "run.json"
    threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    done = CliRunner().invoke(main, ["bench", *sizes, "--rounds", "3", "--json", str(file)])
    assert done.exit_code == 128 + signal.SIGINT
    assert "all-reduce of 8.00 kB" in done.output and "all-reduce of 4.00 kB" not in done.output
    assert "Not measured: allreduce 4000: ended with exit code 130." in done.output
    assert re.search(r"dtk bench: about \d+\.\d minutes more", done.output)
    assert {name: len(taken) for name, taken in read(file).turns["allreduce 8000"].items()} == {
        "collective wait": 3
    }
