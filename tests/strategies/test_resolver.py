"""`strategy.cluster_resolver` says what the launcher told, and only rank 0 is to write."""

from __future__ import annotations

import dataclasses
import pathlib
import socket

import keras
import pytest

from dtk.cluster import detect
from dtk.communicators import create
from dtk.communicators.local import LocalCommunicator
from dtk.strategies.cluster_resolver import resolve

from callbacks import bodies as callback_bodies
from support import bodies

pytestmark = pytest.mark.command

TWO = '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}'
CHIEF = (
    '{"cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"], "evaluator": ["d:4"]}, '
    '"task": {"type": "worker", "index": 1}}'
)
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_ID": "7",
}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
HERE = socket.gethostname()


def resolved(environ, name="null"):
    place = detect(environ)
    if "addresses" in environ:  # which ranks exchange where they meet
        place = dataclasses.replace(place, addresses=tuple(environ["addresses"].split()))
    world = create("null", place)
    world.host_transport.name = name
    found = resolve(world)
    return found.task_type, found.task_id, found.cluster_spec().as_dict(), found.rpc_layer


@pytest.mark.parametrize(
    "environ, name, expected",
    [
        ({}, "local", (None, None, {}, None)),
        ({"TF_CONFIG": TWO}, "collective", ("worker", 1, {"worker": ["a:1", "b:2"]}, "grpc")),
        (
            {"TF_CONFIG": CHIEF},
            "collective",
            ("worker", 1, {"chief": ["a:1"], "worker": ["b:2", "c:3"]}, "grpc"),
        ),
        ({**MPI}, "horovod", ("worker", 1, {"worker": [HERE, HERE]}, None)),
        (
            {**MPI, "TF_CONFIG": TWO},
            "horovod",
            ("worker", 1, {"worker": ["a:1", "b:2"]}, "grpc"),
        ),
        (
            {**SLURM, "addresses": "n1:4 n2:5"},
            "collective",
            ("worker", 1, {"worker": ["n1:4", "n2:5"]}, "grpc"),
        ),
        # Nobody listens on the ports that collectives would use.
        (
            {**SLURM, "addresses": "n1:4 n2:5"},
            "mpi",
            ("worker", 1, {"worker": [HERE, HERE]}, None),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
            "local",
            ("worker", 0, {"worker": [HERE]}, None),
        ),
    ],
    ids=["alone", "tf_config", "chief", "mpi", "both", "slurm", "slurm-mpi", "mpi-of-one"],
)
def test_what_each_launcher_tells(environ, name, expected):
    assert resolved(environ, name) == expected


def test_a_strategy_over_this_process_alone_is_no_job():
    found = resolve(LocalCommunicator())
    assert (found.task_type, found.task_id) == (None, None)
    assert not found.cluster_spec()


def test_a_part_of_a_world_does_not_take_the_whole_ones_addresses():
    part = create("null", detect({"TF_CONFIG": TWO})).split(0)
    assert resolve(part).cluster_spec().as_dict() == {"worker": [HERE, HERE]}


def tell_task(served=False):
    """What TensorFlow's words for this process are, and who is to write."""
    strategy = bodies.served() if served else bodies.strategy()
    resolver, extended = strategy.cluster_resolver, strategy.extended
    return {
        "task": (resolver.task_type, resolver.task_id),
        "cluster": resolver.cluster_spec().as_dict(),
        "rpc": resolver.rpc_layer,
        "writes": (extended.should_checkpoint, extended.should_save_summary),
    }


@pytest.mark.parametrize("backend, size", [("local", 1), ("collective", 2), ("horovod-mpi", 2)])
def test_every_rank_knows_its_task_and_only_rank_0_writes(world, backend, size):
    """Breaks as `strategy.cluster_resolver` being None, and every rank being told to write."""
    ranks = world(backend, size).run(tell_task)
    if size == 1:  # a strategy over this process alone
        assert ranks[0]["task"] == (None, None) and ranks[0]["writes"] == (True, True)
        return
    assert [told["task"] for told in ranks] == [("worker", rank) for rank in range(size)]
    assert [told["writes"] for told in ranks] == [(rank == 0,) * 2 for rank in range(size)]
    assert ranks[0]["cluster"] == ranks[1]["cluster"]
    (addresses,) = ranks[0]["cluster"].values()
    if backend == "collective":
        assert all(address.startswith("127.0.0.1:") for address in addresses)
        assert len(set(addresses)) == size and ranks[0]["rpc"] == "grpc"
    else:
        assert addresses == [HERE] * size and ranks[0]["rpc"] is None


@pytest.mark.parametrize("backend, size", [("served", 2)])
def test_the_chief_of_parameter_servers(world, backend, size):
    (told,) = world(backend, size).run(tell_task, True)
    assert told["task"] == ("chief", 0) and told["writes"] == (True, True)
    assert {role: len(tasks) for role, tasks in told["cluster"].items()} == {
        "chief": 1,
        "ps": 2,
        "worker": 2,
    }


@pytest.mark.parametrize("backend, size", [("local", 1)])
@pytest.mark.parametrize("module", ["cluster_resolver", "dtk_strategy", "devices"])
def test_the_examples_run(world, backend, size, module):
    ((failed, tried),) = world(backend, size).run(
        callback_bodies.examples, f"dtk.strategies.{module}"
    )
    assert tried and not failed


def test_keras_asks_no_strategy_who_is_to_write():
    """Breaks when Keras begins to: then see what its callbacks do on ranks that are told not to."""
    source = pathlib.Path(keras.__file__).parent / "src"
    asking = [
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        for text in [file.read_text()]
        if "should_checkpoint" in text
        or "should_save_summary" in text
        or "cluster_resolver" in text
    ]
    assert asking == []
