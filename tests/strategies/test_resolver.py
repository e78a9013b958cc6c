"""`strategy.cluster_resolver` says what the launcher told, and only rank 0 is to write."""

from __future__ import annotations

import os
import pathlib
import socket

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.cluster import detect
from dtk.communicators import create
from dtk.communicators.local import LocalCommunicator
from dtk.strategies.cluster_resolver import JobResolver, resolve

from callbacks import bodies as callback_bodies
from strategies import bodies

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
    world = create("null", detect(environ))
    world.name = name
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
        ({**SLURM}, "collective", ("worker", 1, {"worker": ["n1:12896", "n2:12896"]}, "grpc")),
        # Nobody listens on the ports that collectives would use.
        ({**SLURM}, "horovod", ("worker", 1, {"worker": [HERE, HERE]}, None)),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
            "local",
            ("worker", 0, {"worker": [HERE]}, None),
        ),
    ],
    ids=["alone", "tf_config", "chief", "mpi", "both", "slurm", "slurm-horovod", "mpi-of-one"],
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


def test_no_address_is_made_of_a_host():
    import tensorflow as tf

    spec = tf.train.ClusterSpec({"worker": ["node1", "::1", "node2:4", "[::1]:4"]})
    found = JobResolver(spec, task_type="worker", task_id=0)
    for task in (0, 1):
        with pytest.raises(ValueError, match="has told no port"):
            found.master("worker", task)
    assert found.master("worker", 2, rpc_layer="grpc") == "grpc://node2:4"
    assert found.master("worker", 3, rpc_layer="grpc") == "grpc://[::1]:4"


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


@pytest.mark.parametrize(
    "backend, size", [("local", 1), ("collective", 2), ("horovod-gloo", 2), ("horovod-mpi", 2)]
)
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


def is_chief(task_type, task_id, cluster_spec):
    """As TensorFlow's tutorial on several workers tells the chief."""
    if task_type is None or task_type == "chief":
        return True
    return task_type == "worker" and task_id == 0 and "chief" not in cluster_spec.as_dict()


def write_filepath(path, task_type, task_id, cluster_spec):
    """The tutorial's: where this task saves, the chief for good and the others to throw away."""
    folder, name = os.path.split(path)
    if not is_chief(task_type, task_id, cluster_spec):
        folder = os.path.join(folder, f"workertemp_{task_id}")
        os.makedirs(folder)
    return os.path.join(folder, name)


def saved_as_the_tutorial_does(folder):
    """Train, let every worker save, delete what is not the chief's; returns what was where."""
    strategy = bodies.strategy()
    x = np.linspace(-1, 1, 40).reshape(10, 4).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, x[:, :1], batch_size=4, verbose=0)

    resolver = strategy.cluster_resolver
    task = resolver.task_type, resolver.task_id, resolver.cluster_spec()
    path = write_filepath(os.path.join(folder, "model.keras"), *task)
    model.save(path)
    saved = keras.models.load_model(path, compile=False)
    weights = [np.array_equal(a, b) for a, b in zip(saved.weights, model.weights, strict=True)]

    checkpoint = tf.train.Checkpoint(model=model)
    place = write_filepath(os.path.join(folder, "checkpoints", "last"), *task)
    tf.train.CheckpointManager(checkpoint, directory=place, max_to_keep=1).save()

    strategy.communicator.barrier()
    files = sorted(
        os.path.relpath(os.path.join(where, name), folder)
        for where, _, names in os.walk(folder)
        for name in names
    )
    return is_chief(*task), os.path.relpath(path, folder), all(weights), files


@pytest.mark.parametrize("backend, size", [("collective", 2)])
def test_the_chief_saves_as_in_tensorflows_tutorial(world, backend, size, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    ranks = world(backend, size).run(saved_as_the_tutorial_does, str(tmp_path))
    assert [chief for chief, *_ in ranks] == [True, False]
    assert [path for _, path, *_ in ranks] == ["model.keras", "workertemp_1/model.keras"]
    assert all(equal for _, _, equal, _ in ranks)
    files = ranks[0][3]
    assert "checkpoints/last/ckpt-1.index" in files
    assert "checkpoints/workertemp_1/last/ckpt-1.index" in files


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
