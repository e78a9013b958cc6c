"""Gradients go from GPU to GPU: on GPUs that this machine pretends to have (tools/gpu/pretend.py).

TensorFlow takes them for real ones: it places and copies, and its NCCL collectives carry the sums.
"""

from __future__ import annotations

import ctypes

import keras
import numpy as np
import pretend
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import dtk
from dtk.communicators.sequencer import CollectiveSequencer

from support import bodies, world
from support.launched import dtk_run


class Noted(keras.Model):
    """Notes the graph in which its step is traced."""

    def train_step(self, data):
        """Compute Keras's own step."""
        self.graph = tf.compat.v1.get_default_graph()
        return super().train_step(data)


def sent():
    """Return the messages and values that NCCL has carried so far, and bytes to and from a host."""
    found = (ctypes.c_long * 4)()
    ctypes.CDLL("libnccl.so.2").pretended_counts(found)
    return np.array(found)


def train(distributed, sharded=False):
    """Train a model with a table and a norm.

    Returns weights, messages, copies to the host, whose indices slices are added by, and what NCCL
    has carried; undistributed, on rank 0 alone, the first and the last.
    """
    # TensorFlow's collectives start before anything else.
    if bodies.strategy().rank > 0 and not distributed:
        return None
    make = dtk.strategies.AllReduceStrategy
    strategy = make("collective", shard_optimizer=sharded) if distributed else None
    random = np.random.default_rng(0)
    x, y = random.integers(0, 9, (48, 4)), random.normal(size=(48, 1)).astype("float32")
    with bodies.scope_of(strategy):
        keras.utils.set_random_seed(2)
        given = keras.Input((4,))
        rows = keras.layers.Flatten()(keras.layers.Embedding(9, 5)(given))
        inner = keras.layers.Dense(1 << 10)(rows)  # large enough to be sent as factors
        normed = keras.layers.BatchNormalization(synchronized=True)(inner)
        model = Noted(given, keras.layers.Dense(1)(normed))
        model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), "mse", metrics=["mae"])
    before = sent()
    context.context().enable_graph_collection()
    with dtk.strategies.undistributed():
        model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    ran = context.context().export_run_metadata()
    context.context().disable_graph_collection()
    weights, carried = bodies.flat(model.get_weights()), sent() - before
    if not distributed:
        return weights, carried
    operations = model.graph.get_operations()
    messages = [
        (
            one.type,
            one.get_attr("T").name,
            one.device.rpartition("/")[2],
            one.get_attr("communication_hint").decode(),
            int(tf.get_static_value(one.inputs[2])),
            [token.op.name for token in one.inputs if token.dtype == tf.resource],
        )
        for one in operations
        if one.type.startswith("Collective")
    ]
    # Of all graphs that ran, as divided between memories.
    nodes = [
        node for one in ran.function_graphs for graph in one.partition_graphs for node in graph.node
    ]
    copies = [
        (node.input[0], tf.dtypes.as_dtype(node.attr["T"].type).name)
        for node in nodes
        if node.op == "_Send"
        and "GPU" in node.attr["send_device"].s.decode()
        and node.input[0].startswith("StatefulPartitionedCall/")  # of a step
        and "/ctrl/" not in node.input[0]
    ]
    sums = ("UnsortedSegmentSum", "ResourceScatterAdd", "ResourceScatterSub")
    added = [one.inputs[1].op.type for one in operations if one.type in sums]
    return weights, messages, copies, added, carried


@pytest.mark.full_but("nccl-2-True")
@pytest.mark.worlds(("nccl", 2))
@pytest.mark.parametrize("sharded", [False, True])
def test_floats_go_from_gpu_to_gpu_and_everything_else_through_the_host(pool, sharded):
    alone, *_, (nothing, *_) = pool.run(train, False)[0]
    assert nothing == 0
    for weights, messages, copies, added, carried in pool.run(train, True, sharded):
        assert carried[1] >= 6 * weights.size, "six steps, each with all gradients or weights"
        assert np.linalg.norm(weights - alone) <= 1e-5 * np.linalg.norm(alone)
        floats = [one for one in messages if one[1] == "float32"]
        others = [one for one in messages if one[1] != "float32"]
        assert len(floats) >= 3, "gradients, rows of the table, moments"
        assert {(device, hint) for _, _, device, hint, _, _ in floats} == {("device:GPU:0", "nccl")}
        assert {(device, hint) for _, _, device, hint, _, _ in others} == {("device:CPU:0", "auto")}
        (card,) = {key for _, _, _, _, key, _ in floats}
        assert card not in {key for _, _, _, _, key, _ in others}
        ((_,),) = {tuple(tokens) for *_, tokens in floats}
        # A rank without a part of the table adds none.
        assert "Unique" in added or sharded
        assert set(added) <= {"Unique"}, "a card adds slices of one line in no order"
        assert [one for one in copies if one[1] in ("float16", "float32")] == []
        assert len(copies) <= 8, f"each waits for all that the card has to do: {copies}"


def mirrored(devices):
    """Train over so many GPUs of this process; return weights and what NCCL carried."""
    digits, labels = bodies.digits()
    strategy = dtk.strategies.MirroredStrategy(devices) if devices else None
    with bodies.scope_of(strategy):
        keras.utils.set_random_seed(2)
        dense = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *dense])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    before = sent()
    model.fit(digits[:144], labels[:144], batch_size=16, verbose=0)
    return bodies.flat(model.get_weights()), (sent() - before)[1]


@pytest.mark.worlds(("nccl", 1))
def test_replicas_of_one_process_sum_by_nccl(pool):
    ((alone, nothing),), ((weights, carried),) = pool.run(mirrored, 0), pool.run(mirrored, 2)
    assert np.linalg.norm(weights - alone) <= 1e-5 * np.linalg.norm(alone)
    assert nothing == 0 and carried >= 2 * 9 * weights.size


def ragged():
    """What two replicas gather of three and four rows, by a graph that does not know how many."""
    strategy = bodies.strategy(2)

    def gathered(rows):
        replica = strategy.extended.replica_communicator()
        return replica.allgather(tf.range(float(rows + replica.rank)))

    @tf.function(input_signature=[tf.TensorSpec((), tf.int32)])
    def run(rows):
        return strategy.run(gathered, (rows,))

    return [found.numpy() for found in strategy.experimental_local_results(run(3))]


@pytest.mark.worlds(("nccl", 1))
def test_replicas_of_one_process_gather_as_many_rows_as_each_has(pool):
    """Breaks as sizes that are all zero but one's own, or as memory for rows that nobody has."""
    (found,) = pool.run(ragged)
    for rows in found:
        np.testing.assert_array_equal(rows, [0, 1, 2, 0, 1, 2, 3])


GRID = """
import dtk, keras, numpy as np
dtk.communicators.Communicator.bucket_bytes = 64  # one for each gradient
strategy = dtk.strategies.AllReduceStrategy("collective", model_parallel=2)
random = np.random.default_rng(0)
x, y = (random.normal(size=(64, n)).astype("float32") for n in (8, 1))
with strategy.scope():
    keras.utils.set_random_seed(1)
    inner = [dtk.layers.ChannelParallelDense(16, activation="tanh") for _ in range(3)]
    model = keras.Sequential([keras.Input((8,)), *inner, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
print(model.fit(x, y, batch_size=16, epochs=20, verbose=0).history["loss"][-1])
"""


@pytest.mark.full("four processes")
@pytest.mark.command
def test_groups_that_share_a_gpu_do_not_wait_for_each_other(tmp_path):
    """A rank is in a group that divides a model, and in one that adds up its gradients."""
    if (reason := world.missing("nccl")) is not None:
        pytest.skip(reason)
    (tmp_path / "grid.py").write_text(GRID)
    env = {**pretend.environment(4), "TF_CPP_MIN_LOG_LEVEL": "2", "DTK_CALIBRATE": "0"}
    done = dtk_run("-n", 4, "grid.py", cwd=tmp_path, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({line.split()[-1] for line in done.stdout.splitlines()}) == 1


SERVED = """
import dtk, keras, numpy as np, tensorflow as tf
strategy = dtk.strategies.ParameterServerStrategy(consistency="sync")
random = np.random.default_rng(0)
x, y = (random.normal(size=(64, n)).astype("float32") for n in (8, 1))
with strategy.scope():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
if getattr(strategy, "is_evaluator", False):
    print("evaluator", *(one.name for one in tf.config.list_logical_devices()))
else:
    losses = model.fit(x, y, batch_size=16, epochs=2, verbose=0).history["loss"]
    print("chief", *(one.name for one in tf.config.list_logical_devices()))
    print("losses", *losses)
"""


@pytest.mark.command
def test_workers_have_a_gpu_each_and_the_evaluator_the_next_one(tmp_path):
    """Servers and the chief have none; each task would hold the memory of every GPU."""
    if (reason := world.missing("nccl")) is not None:
        pytest.skip(reason)
    (tmp_path / "served.py").write_text(SERVED)
    options = ("-n", 2, "--ps", 1, "--evaluator", "served.py")
    done = dtk_run(*options, cwd=tmp_path, **pretend.environment(3), TF_CPP_MIN_LOG_LEVEL="2")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("] ")[2].split() or line.split() for line in done.stdout.splitlines()]
    told = {name: rest for name, *rest in filter(None, lines)}
    gpus = [device for device in told["chief"] if "GPU" in device]
    assert [one.split("/")[1:4:2] for one in gpus] == [
        ["job:worker", f"task:{task}"] for task in range(2)
    ]
    assert len([one for one in told["evaluator"] if "GPU" in one]) == 1
    assert "GPU" not in done.stderr
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(64, n)).astype("float32") for n in (8, 1))
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    alone = model.fit(x, y, batch_size=16, epochs=2, verbose=0).history["loss"]
    np.testing.assert_allclose([float(loss) for loss in told["losses"]], alone, rtol=1e-5)


def eager():
    """Run an eager message in a scope of another device; return where it was."""
    bodies.strategy(2)
    with tf.device("CPU:1"):
        (told,) = CollectiveSequencer().run([tf.zeros(1)], lambda f: [tf.identity(f[0])], "copy")
    return told.device


@pytest.mark.worlds(("local", 1))
def test_eager_messages_name_their_device(pool):
    assert pool.run(eager)[0].endswith("CPU:0")
