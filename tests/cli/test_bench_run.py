"""A run of worlds, from start to end."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dtk.bench import runner
from dtk.bench.process_world import command
from dtk.bench.setting import Setting
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
