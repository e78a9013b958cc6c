"""What a Keras 3 user on TensorFlow has without dtk, and what happens with it.

    python docs/broken/what_breaks.py                  # lists the cases and how to start each
    python docs/broken/what_breaks.py mirrored-clip    # runs one

Each case is the documented way to do it, and ends by printing what came out: an error, or numbers
that are wrong. Of dtk, only the launcher is used, what keeps TensorFlow's start-up quiet, and
`undistributed()`, without which `dtk run` refuses processes that train alone.
"""

import argparse
import os
import socket
import tempfile
from pathlib import Path

import dtk.quiet
import dtk.strategies
import keras
import numpy as np
import tensorflow as tf

HERE = "docs/broken/what_breaks.py"
CASES = {
    "multi-worker": ("dtk run -n 2", "tf.distribute.MultiWorkerMirroredStrategy + model.fit"),
    "parameter-server": ("python", "tf.distribute.ParameterServerStrategy + model.fit"),
    "horovod": ("dtk run -n 2 --communicator horovod", "horovod.keras.DistributedOptimizer"),
    "horovod-callbacks": ("dtk run -n 2 --communicator horovod", "horovod.keras.callbacks"),
    "mirrored": ("python", "tf.distribute.MirroredStrategy, the plain case (works)"),
    "mirrored-clip": ("python", "tf.distribute.MirroredStrategy with global_clipnorm"),
    "mirrored-tail": ("python", "tf.distribute.MirroredStrategy with an uneven last batch"),
    "mirrored-accumulation": ("python", "MirroredStrategy with gradient_accumulation_steps=2"),
    "mirrored-executions": ("python", "MirroredStrategy with steps_per_execution=2"),
    "mirrored-outside": ("python", "MirroredStrategy, model built outside the scope"),
    "keras-distribution": ("python", "keras.distribution.DataParallel on TensorFlow"),
}

X = np.random.default_rng(0).normal(size=(251, 8)).astype("float32")
Y = X @ np.arange(8, dtype="float32")[:, None]


def make_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )


def train(strategy, rows=240, compile_more=None, **optimizer):
    """Plain fit under a strategy, without shuffling; returns the weights."""
    with strategy.scope():
        model = make_model()
        sgd = keras.optimizers.SGD(0.05, momentum=0.9, **optimizer)
        model.compile(sgd, "mse", **(compile_more or {}))
    model.fit(X[:rows], Y[:rows], batch_size=64, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()


def make_two_devices():
    with dtk.quiet.device_start():
        (cpu,) = tf.config.list_physical_devices("CPU")
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        tf.config.list_logical_devices()


def compare(**options):
    """Weights of two devices against those of plain Keras."""
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    alone, together = train(tf.distribute.get_strategy(), **options), train(mirrored, **options)
    pairs = zip(alone, together, strict=True)
    difference = max(np.abs(a - b).max() / np.abs(a).max() for a, b in pairs)
    print(f"weights of two devices and of one differ by {difference:.0e} (rounding: 1e-06)")


def multi_worker():
    train(tf.distribute.MultiWorkerMirroredStrategy())


def parameter_server():
    doors = [socket.socket() for _ in range(2)]
    for door in doors:
        door.bind(("127.0.0.1", 0))
    worker, ps = (f"127.0.0.1:{door.getsockname()[1]}" for door in doors)
    for door in doors:
        door.close()
    cluster = tf.train.ClusterSpec({"worker": [worker], "ps": [ps]})
    servers = [tf.distribute.Server(cluster, role, 0) for role in ("worker", "ps")]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    train(tf.distribute.ParameterServerStrategy(resolver))
    del servers


def horovod():
    folder = tempfile.mkdtemp()
    os.environ["HOROVOD_TIMELINE"] = str(Path(folder) / "timeline.json")
    import horovod.keras as hvd

    hvd.init()
    mine = slice(hvd.rank(), None, hvd.size())  # each rank its share of the rows
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05 * hvd.size())), "mse")
    model.fit(X[mine], Y[mine], batch_size=32, epochs=3, verbose=0)
    first = model.get_weights()[0].ravel()[0]
    hvd.shutdown()  # writes the timeline to its end
    timelines = [path.read_text() for path in Path(folder).iterdir()]
    sent = sum(text.count("ALLREDUCE") for text in timelines)
    print(f"rank {os.environ['HOROVOD_RANK']}: fit reports success; first weight {first:.6f}")
    if timelines:
        print(f"rank 0: its timeline holds {sent} all-reduces")


def horovod_callbacks():
    import horovod.keras as hvd

    hvd.init()
    callbacks = {
        "BroadcastGlobalVariablesCallback": hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        "MetricAverageCallback": hvd.callbacks.MetricAverageCallback(),
        "LearningRateWarmupCallback": hvd.callbacks.LearningRateWarmupCallback(0.1),
    }
    for name, callback in callbacks.items():
        model = make_model()
        model.compile(keras.optimizers.SGD(0.05), "mse")
        try:
            model.fit(X, Y, batch_size=64, verbose=0, callbacks=[callback])
            print(f"{name}: no error")
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")


def mirrored_outside():
    model = make_model()
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)


class CountRows(keras.layers.Layer):
    """Notes how many rows a device computes: half of the batch where two share it."""

    seen: list = []

    def call(self, inputs):
        tf.py_function(lambda n: self.seen.append(int(n)), [tf.shape(inputs)[0]], [])
        return inputs


def keras_distribution():
    parallel = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    keras.distribution.set_distribution(parallel)
    model = keras.Sequential([CountRows(), make_model()])
    model.compile("sgd", "mse")
    model.fit(X[:64], Y[:64], batch_size=64, verbose=0)
    print(f"over devices {parallel.device_mesh.devices.tolist()}, a batch of 64 was computed as")
    print(f"{' + '.join(map(str, CountRows.seen))} rows")


def short(text):
    """The sentences of an error, without the stack that TensorFlow and Keras put into it."""
    inside = ("File ", "Detected ", "Arguments ", "  ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(inside)]
    return " ".join(lines).replace("\x1b[1m", "").replace("\x1b[0m", "")[:300]


def main():
    parser = argparse.ArgumentParser(description="Show what breaks on Keras 3 without dtk.")
    parser.add_argument("case", nargs="?", choices=CASES)
    case = parser.parse_args().case
    if case is None:
        for name, (command, what) in CASES.items():
            print(f"{what}\n    {command} {HERE} {name}")
        return
    with_options = {
        "mirrored": {},
        "mirrored-clip": {"global_clipnorm": 1.0},
        "mirrored-tail": {"rows": 251},
        "mirrored-accumulation": {"gradient_accumulation_steps": 2},
        "mirrored-executions": {"compile_more": {"steps_per_execution": 2}},
    }
    if CASES[case][0] == "python":
        make_two_devices()
    try:
        with dtk.strategies.undistributed():
            if case in with_options:
                compare(**with_options[case])
            else:
                globals()[case.replace("-", "_")]()
    except Exception as error:
        print(f"{type(error).__name__}: {short(str(error))}", flush=True)
        os._exit(1)  # at once: what failed may also wait for others at the end


if __name__ == "__main__":
    main()
