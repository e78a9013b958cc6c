"""Worlds start, take turns, rest, and are never left behind."""

import contextlib
import doctest
import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import psutil
import pytest

from dtk.bench import places, process_world
from dtk.bench.measure import WorldLost
from dtk.bench.process_world import World, command
from dtk.launch import job_processes, machines


@pytest.fixture
def make(monkeypatch):
    """`make(setting, module, busy)`: a world of two that is closed after the test."""
    path = os.pathsep.join([str(Path(__file__).parent), os.getcwd()])
    monkeypatch.setenv("PYTHONPATH", path)
    worlds = []

    def make(setting=None, module="bench_worker", busy=False):
        sits = command(module, setting or {})
        processes = places.place("collective", sits, 2, (), machines.survey)
        worlds.append(World("played", processes, 2, essential=False, busy=busy))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
        assert job_processes.members(world.job.job_id) == []


def members(world):
    """The processes that the agents started."""
    found = map(psutil.Process, job_processes.members(world.job.job_id))
    return [
        one
        for one in found
        if any(part.endswith("dtk/bench/worker.py") for part in one.cmdline()[:3])
    ]


def test_all_ranks_answer_in_their_order_whatever_libraries_print(make):
    world = make()
    world.start()
    assert [hello["rank"] for hello in world.hello] == [0, 1]
    assert [hello["versions"] for hello in world.hello] == [{"nothing": "1"}] * 2
    built = {"parameters": 0, "variants": ["wait", "die"], "absent": {"half": "there is no half"}}
    assert world.ask({"build": "mlp"}) == [built] * 2
    for _ in range(2):
        answers = world.ask({"measure": "wait"})
        assert [answer["sent"] for answer in answers] == [0, 1]
        assert all(0.01 <= answer["seconds"] < answer["fit"] for answer in answers)


def test_a_busy_world_is_stopped_until_it_is_asked_again(make):
    world = make(busy=True)
    world.start()
    assert [one.status() for one in members(world)] == [psutil.STATUS_STOPPED] * 2
    world.ask({"build": "mlp"})
    assert psutil.STATUS_STOPPED not in [one.status() for one in members(world)]
    for _ in range(2):
        world.rest()
        assert [one.status() for one in members(world)] == [psutil.STATUS_STOPPED] * 2


def test_a_world_that_waits_is_not_stopped(make):
    world = make()
    world.start()
    world.rest()
    assert psutil.STATUS_STOPPED not in [one.status() for one in members(world)]


def test_a_worker_sees_what_is_beside_it_and_not_what_is_beside_dtks(tmp_path):
    """Breaks as PyTorch that imports dtk's report.py, or its plot.py, instead of another's."""
    (tmp_path / "beside.py").touch()
    (tmp_path / "seen.py").write_text(
        "import importlib.util\n"
        "class Worker:\n"
        "    def __init__(self, setting):\n"
        "        names = ('report', 'plot', 'beside')\n"
        "        seen = [name for name in names if importlib.util.find_spec(name)]\n"
        "        self.rank, self.versions = 0, seen\n"
    )
    done = subprocess.run(
        command(str(tmp_path / "seen.py"), {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert json.loads(done.stdout)["versions"] == ["beside"], done.stderr


def test_a_world_ends_by_itself_also_while_it_rests(make):
    for busy in (False, True):
        world = make(busy=busy)
        world.start()
        world.close()
        assert set(world.job.returncodes.values()) == {0}


def test_a_rank_that_fails_in_its_turn_is_named_with_its_exception(make):
    world = make()
    world.start()
    world.ask({"build": "mlp"})
    with pytest.raises(
        WorldLost, match="rank 1 ended with exit code 1: RuntimeError: cannot go on"
    ):
        world.ask({"measure": "die"})


@pytest.mark.parametrize(
    ("setting", "module", "message"),
    [
        ({"fail": "start"}, "bench_worker", "exit code 1: RuntimeError: cannot start"),
        ({}, "no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_world_that_cannot_start_says_why(make, setting, module, message):
    with pytest.raises(WorldLost, match=message):
        make(setting, module).start()


def test_who_does_not_know_the_key_is_turned_away(make):
    world = make()
    address = world._ranks._door.getsockname()

    def intrude():
        with contextlib.suppress(OSError), socket.create_connection(address) as line:
            line.sendall(b"\0\0\0\x05hello")

    intruder = threading.Thread(target=intrude)
    intruder.start()
    intruder.join()
    world.start()
    assert [hello["rank"] for hello in world.hello] == [0, 1]


def test_the_examples_run():
    failed, attempted = doctest.testmod(process_world)
    assert attempted and not failed
