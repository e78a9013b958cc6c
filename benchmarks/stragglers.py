"""What one slow worker costs, by consistency: rows per second behind parameter servers.

    python benchmarks/stragglers.py

Three workers read pipelines of their own; one takes five times as long for a batch. Their own
speeds are measured first, each as the only worker of a job. Reading, not computing, is what is slow
here, so that the workers of one small machine do not slow each other down. Everything is real
otherwise: processes, servers, gradients.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import hosts

parser = argparse.ArgumentParser(description="One slow worker, by consistency.")
parser.add_argument("--workers", type=int, default=3)
parser.add_argument(
    "--seconds", type=float, default=0.05, help="a fast worker needs to read a batch"
)
parser.add_argument("--slowdown", type=float, default=5.0, help="of worker 0")
parser.add_argument("--tau", type=int, default=4, help="for the bounded delay")
parser.add_argument("--rounds", type=int, default=5, help="measurements of each, in turns")
parser.add_argument("--steps", type=int, default=60, help="batches in a measurement")
parser.add_argument("--slow", type=int, default=1, help=argparse.SUPPRESS)
args = parser.parse_args()

ROWS = 32  # in a worker's batch


def measure():
    """On the chief of a job: rows per second of every consistency, as JSON."""
    import dtk
    import keras
    import tensorflow as tf
    from dtk.strategies import Async, BoundedDelay, Sync
    from sklearn.datasets import load_digits

    strategy = dtk.strategies.ParameterServerStrategy("async")
    images, labels = load_digits(return_X_y=True)

    def slowly(dataset, seconds):
        """The dataset, every element of which takes so long."""
        shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
        types = [spec.dtype for spec in tf.nest.flatten(dataset.element_spec)]
        variant = tf.raw_ops.SleepDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            sleep_microseconds=tf.constant(int(1e6 * seconds), tf.int64),
            output_types=types,
            output_shapes=shapes,
        )
        return tf.data.experimental.from_variant(variant, dataset.element_spec)

    def rows(context):
        data = tf.data.Dataset.from_tensor_slices((images.astype("float32") / 16, labels))
        data = data.repeat().batch(ROWS, drop_remainder=True)
        is_slow = args.slow and context.input_pipeline_id == 0
        return slowly(data, args.seconds * (args.slowdown if is_slow else 1.0))

    def model_with(consistency):
        strategy.consistency = consistency
        with strategy.scope():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model, strategy.distribute_datasets_from_function(rows)

    kinds = {"async": Async()}
    if strategy.workers > 1:
        kinds |= {f"tau={args.tau}": BoundedDelay(args.tau), "sync": Sync(), "sync + 1": Sync(1)}
    models = {name: model_with(kind) for name, kind in kinds.items()}
    found = {name: [] for name in models}
    for turn in range(args.rounds + 1):
        for name, (model, data) in models.items():
            strategy.consistency = kinds[name]
            # A synchronous step has several batches.
            steps = max(3, args.steps // strategy.slices)
            began = time.perf_counter()
            model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0)
            taken = time.perf_counter() - began
            if turn:  # the first one traces
                found[name].append(steps * strategy.slices * ROWS / taken)
    print("RESULT", json.dumps(found), flush=True)


def job(workers, slow):
    """Run this script as a job; what its chief measured."""
    command = [sys.executable, "-m", "dtk.cli.main", "run", "-n", str(workers), "--ps", "1"]
    options = [f"--{name}={getattr(args, name)}" for name in ("seconds", "slowdown", "tau")]
    options += [f"--rounds={args.rounds}", f"--steps={args.steps}", f"--slow={int(slow)}"]
    done = subprocess.run(
        [*command, __file__, *options], stdout=subprocess.PIPE, text=True, timeout=900, check=True
    )
    return hosts.result(done.stdout)


def spread(values):
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:8.0f} ({low:.0f} - {high:.0f})"


def compare():
    own = [job(1, slow=True)["async"], job(1, slow=False)["async"]]
    total = statistics.median(own[0]) + (args.workers - 1) * statistics.median(own[1])
    with_slow, without = job(args.workers, slow=True), job(args.workers, slow=False)
    print(f"rows per second: median (quartiles) of {args.rounds}\n")
    print(f"the slow worker alone   {spread(own[0])}")
    print(f"a fast worker alone     {spread(own[1])}")
    print(f"sum of {args.workers} own speeds     {total:8.0f}\n")
    print(f"{'':10}{'one slow worker':>24}{'of the sum':>12}{'none slow':>24}{'slow / none':>13}")
    for name in with_slow:
        slow, none = (statistics.median(found[name]) for found in (with_slow, without))
        print(
            f"{name:10}{spread(with_slow[name]):>24}{slow / total:12.2f}"
            f"{spread(without[name]):>24}{slow / none:13.2f}"
        )


if os.environ.get("TF_CONFIG"):
    measure()
else:
    compare()
