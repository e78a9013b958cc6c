"""What dividing one model among two ranks costs and saves: time, memory and bytes, in turns.

    python benchmarks/model_parallel.py
    python benchmarks/model_parallel.py --only pipeline --rounds 5

    dense      two wide Dense layers, whole and in channel parts: peak memory and time of a step
    channels   the blocks of VGG-16 on 32 x 32 images, whole, in channel parts, and these in pairs
    images     convolutions on 1024 x 1024 images, whole, in channel parts, and in rows
    deep       ten convolutions on 512 x 512 images, whole, and in rows on two, three and four ranks
    small      the same on 32 x 32 images: what is left is what layers in parts need anyway
    pipeline   eight Dense layers on one rank, and as two stages by number of microbatches

Every turn is a job of its own, with one core for each rank while there are cores: "whole" is one
rank, the others two, or as many as their name says. A ratio is the time of "whole" in the same
round over theirs: of two ranks 2 would be perfect, or 2 M / (M + 1) for two stages and M
microbatches. Three figures of memory, each of the rank that has most:

    memory     the most a process held in the steps, less what it held before the model was made
    tensors    the most that TensorFlow's allocator had handed out in the steps, the batch included
    before     what the process held before the model was made: libraries, and joining the ranks

With oneDNN TensorFlow never returns memory of tensors to the system, so that the first is above the
second by what lies between tensors, by the graph, and by what NumPy holds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

MICROBATCHES = (1, 2, 4, 8, 16)
CASES = {
    "dense": ("whole", "output", "output-input"),
    "channels": ("whole", "channels", "output-input"),
    "images": ("whole", "channels", "rows"),
    "deep": ("whole", "rows", "rows 3", "rows 4"),
    "small": ("whole", "rows", "rows 3", "rows 4"),
    "pipeline": ("whole", *(f"gpipe {m}" for m in MICROBATCHES), "1f1b 8"),
}
parser = argparse.ArgumentParser(description="What dividing one model among two ranks costs.")
parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
parser.add_argument("--rounds", type=int, default=3, help="turns of each")
parser.add_argument("--steps", type=int, default=6, help="measured steps of a turn")
parser.add_argument("--json", metavar="FILE", help="write all measurements there")
parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
args = parser.parse_args()


def model_of(case, variant):
    """The model of a case, its rows, and the shape of one."""
    import dtk
    import keras

    def conv(filters, name):
        return keras.layers.Conv2D(filters, 3, padding="same", activation="relu", name=name)

    if case == "dense":
        layers = [
            keras.Input((2048,)),
            keras.layers.Dense(8192, "relu", name="wide"),
            keras.layers.Dense(2048, name="back"),
        ]
        plan = {"wide": "output", "back": "input" if variant == "output-input" else "output"}
        return _divided(keras.Sequential(layers), variant, plan), 64, (2048,)
    if case == "channels":
        layers = [keras.Input((32, 32, 3))]
        for block, filters in enumerate((64, 128, 256)):
            layers += [conv(filters, f"conv_{block}_{i}") for i in range(2)]
            layers.append(keras.layers.MaxPooling2D())
        layers += [keras.layers.Flatten(), keras.layers.Dense(10, name="head")]
        plan = {"conv_*": "channels"}
        if variant == "output-input":
            plan = {"conv_*_0": "output", "conv_*_1": "input"}
        return _divided(keras.Sequential(layers), variant, plan), 16, (32, 32, 3)
    if case == "images":
        layers = [keras.Input((1024, 1024, 3)), conv(8, "conv_0"), conv(8, "conv_1")]
        layers += [keras.layers.MaxPooling2D(name="pool"), conv(8, "conv_2")]
        layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
        plan = {"conv_*": variant} | ({"pool": "rows"} if variant == "rows" else {})
        return _divided(keras.Sequential(layers), variant, plan), 4, (1024, 1024, 3)
    if case in ("deep", "small"):
        shape = (512, 512, 3) if case == "deep" else (32, 32, 3)
        layers = [keras.Input(shape), *(conv(16, f"conv_{i}") for i in range(10))]
        layers += [keras.layers.MaxPooling2D(8, name="pool"), keras.layers.Flatten()]
        layers += [keras.layers.Dense(10)]
        plan = {"conv_*": "rows", "pool": "rows"}
        return _divided(keras.Sequential(layers), variant, plan), 8, shape
    width, rows = (
        512,
        4096,
    )  # many rows, as activations of real stages: what a matmul reads is small
    halves = [
        keras.Sequential(
            [keras.Input((width,)), *(keras.layers.Dense(width, "relu") for _ in range(4))]
        )
        for _ in range(2)
    ]
    halves[1].add(keras.layers.Dense(8))  # every rank is given what the last stage puts out
    if variant == "whole":
        return keras.Sequential(halves), rows, (width,)
    schedule, microbatches = variant.split()
    return dtk.layers.Pipeline(halves, int(microbatches), schedule), rows, (width,)


def _divided(model, variant, plan):
    import dtk

    return model if variant == "whole" else dtk.layers.parallelize(model, plan)


def memory(of):
    """What this process holds ("VmRSS") or has held at most ("VmHWM"), in MiB."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith(of))


def measure(case, variant):
    """Train a few steps; rank 0 prints milliseconds of a step, memory and bytes sent."""
    import dtk
    import keras
    import numpy as np
    import tensorflow as tf

    environment = dtk.cluster.detect()
    world, cores = environment.size, sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[environment.rank % len(cores)]})  # threads to come inherit it
    strategy = dtk.strategies.AllReduceStrategy(model_parallel=world, self_test=False)
    keras.utils.set_random_seed(1)
    before = memory("VmRSS")
    with strategy.scope():
        model, rows, shape = model_of(case, variant)
        model.compile(keras.optimizers.SGD(1e-4, momentum=0.9), "mse")
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, *shape)).astype("float32")
    y = np.zeros((rows, *model.output_shape[1:]), "float32")
    data = tf.data.Dataset.from_tensors((x, y)).repeat(args.steps + 3)

    class Clock(keras.callbacks.Callback):
        times, sent = [], []

        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:  # what building and tracing took is over
                with open("/proc/self/clear_refs", "w") as file:
                    file.write("5")  # count the most from here on; see proc(5)
                tf.config.experimental.reset_memory_stats("CPU:0")
            self.times.append(time.perf_counter())
            self.sent.append(strategy.model_communicator.bytes_sent)

    model.fit(data, verbose=0, callbacks=[Clock()])
    gaps = np.diff(Clock.times)[2:]
    held = {
        "peak": memory("VmHWM") - before,
        "tensors": tf.config.experimental.get_memory_info("CPU:0")["peak"] / 2**20,
        "before": before,
    }
    ranks = strategy.world.allgather_object(held)
    if strategy.is_chief:
        found = {
            "ms": 1e3 * statistics.median(gaps),
            "sent": (Clock.sent[-1] - Clock.sent[2]) / (len(Clock.sent) - 3),
            **{name: max(rank[name] for rank in ranks) for name in held},
        }
        print("measured " + json.dumps(found), flush=True)


def turn(case, variant):
    """Run one turn as a job."""
    workers = "1" if variant == "whole" else "2"
    if variant.startswith("rows "):
        workers = variant.split()[1]
    command = [sys.executable, "-m", "dtk.cli.main", "run", "-n", workers, __file__]
    command += ["--steps", str(args.steps), "--measure", case, variant]
    env = {**os.environ, "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)
    lines = [line for line in done.stdout.splitlines() if "measured {" in line]
    if done.returncode or not lines:
        sys.exit(f"{case} {variant}:\n{done.stdout}{done.stderr}")
    return json.loads(lines[0].partition("measured ")[2])


def spread(values, digits=1):
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def main():
    console, everything = Console(), {}
    for case in args.only:
        found = {variant: [] for variant in CASES[case]}
        for _ in range(args.rounds):
            for variant, turns in found.items():
                turns.append(turn(case, variant))
        everything[case] = found
        columns = ("ms per step", "times as fast", "memory, MiB", "tensors", "before", "sent, MB")
        table = Table("", *columns, title=case)
        whole = [t["ms"] for t in found["whole"]]
        for variant, turns in found.items():
            ratios = [w / t["ms"] for w, t in zip(whole, turns, strict=True)]
            table.add_row(
                variant,
                spread([t["ms"] for t in turns]),
                spread(ratios, 2),
                *(spread([t[name] for t in turns], 0) for name in ("peak", "tensors", "before")),
                f"{turns[0]['sent'] / 1e6:.2f}",
            )
        console.print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(everything, file)


if args.measure:
    measure(*args.measure)
else:
    main()
