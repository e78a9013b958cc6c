"""What `dtk plan --model` predicts against what is measured, for one model divided in several ways.

    python benchmarks/plan_model.py                     # two workers, a core each
    python benchmarks/plan_model.py --batch-size 64 --size 48

Workers measure the steps of `fit` under each plan, and what a message and a byte take between them.
Then this process, on one worker's cores, measures layers by themselves, and predicts the same
plans. Nothing of the steps that are predicted goes into that. Writes a table as Markdown.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

parser = argparse.ArgumentParser(description="Predicted and measured time of a divided model.")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=32, help="of all workers")
parser.add_argument("--size", type=int, default=32, help="rows and columns of an image")
parser.add_argument("--filters", type=int, default=32)
parser.add_argument("--steps", type=int, default=6, help="of an epoch")
parser.add_argument("--epochs", type=int, default=5, help="that are measured, after one")
parser.add_argument("--measure", action="store_true", help="as a worker: train and print")
args = parser.parse_args()

PLANS = ("one worker", "data", "output", "rows", "stages")


def build():
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(1)
    x = image = keras.Input((args.size, args.size, 3))
    for filters in (args.filters, 2 * args.filters):
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(256, "relu")(layers.Flatten()(x))
    return keras.Model(image, layers.Dense(10)(x))


def divided(way, workload, workers):
    """Find the plan of a way to divide the model."""
    from dtk.planning.model.layer_costs import RankGrid
    from dtk.planning.model.search import best_stages, same_splits

    if way in ("one worker", "data"):
        return same_splits(workload, RankGrid(1 if way == "one worker" else workers, 1))
    grid = RankGrid(1, workers)
    return best_stages(workload, grid) if way == "stages" else same_splits(workload, grid, way)


def workload_of(model, computing, software):
    from dtk.planning.inputs import Cluster, Link
    from dtk.planning.model.graph import read
    from dtk.planning.model.layer_costs import Workload

    cluster = Cluster(Link(), per_host=args.workers, software=software)
    return Workload(*read(model), args.batch_size, computing, cluster)


def measure():
    """On every rank: train by each plan; rank 0 prints what a step took."""
    import dtk
    import keras
    import numpy as np
    from dtk.planning.inputs import Software
    from dtk.planning.model.layer_costs import Rates

    rng = np.random.default_rng(0)
    count = args.steps * args.batch_size
    x = rng.normal(size=(count, args.size, args.size, 3)).astype("float32")
    y = rng.integers(0, 10, count)

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            took.append((time.perf_counter() - self.began) / args.steps)

    world = dtk.communicators.create()
    found = {}
    for way in ("one worker",) if world.size == 1 else PLANS[1:]:
        parts = 1 if way in ("data", "one worker") else world.size
        strategy = dtk.strategies.AllReduceStrategy(world, model_parallel=parts)
        with strategy.scope():
            model = build()
            # Where stages are cut does not depend on what a byte takes here.
            workload = workload_of(model, Rates(1e10, 1e9), Software())
            plan = divided(way, workload, world.size).plan
            if plan.layers:
                model = dtk.layers.parallelize(model, plan.layers)
            elif plan.borders:
                stages = plan.stages(model)
                model = dtk.layers.Pipeline(stages, plan.microbatches, plan.schedule)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss)
        took = []
        options = {"batch_size": args.batch_size, "epochs": args.epochs + 1, "verbose": 0}
        model.fit(x, y, callbacks=[Clock()], shuffle=False, **options)
        found[way] = took[1:]
    costs = world.costs
    known = None if costs is None else [costs.message, costs.byte]
    if world.rank == 0:
        print("RESULT", json.dumps([found, known]), flush=True)


def job(workers):
    command = [sys.executable, "-m", "dtk.cli.main", "run", "-n", str(workers), __file__]
    command += [*sys.argv[1:], "--measure"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stdout}{done.stderr}")
    line = next(line for line in done.stdout.splitlines() if "RESULT" in line)
    return json.loads(line.partition("RESULT")[2])


def main():
    from dtk.launch.agent import cores
    from dtk.planning.inputs import Software

    here = cores()
    found, (message, byte) = job(args.workers)
    # One worker, on the cores of one.
    os.sched_setaffinity(0, here[: max(1, len(here) // args.workers)])
    found |= job(1)[0]
    from dtk.planning.model.graph import read
    from dtk.planning.model.layer_costs import LayerCosts, RankGrid, Rates
    from dtk.planning.model.layer_times import MeasuredRates, rates_here
    from dtk.planning.model.search import pipeline

    model = build()
    computing = MeasuredRates(model, read(model)[0], args.batch_size, rates_here())
    workload = workload_of(model, computing, Software(message, byte))
    cut = workload_of(model, Rates(1e10, 1e9), Software())
    print(f"message {1e3 * message:.2f} ms, byte {1e9 * byte:.2f} ns; {computing.told}")
    print("| divided | measured, ms (quartiles) | predicted | error |\n|---|---|---|---|")
    for way in PLANS:
        if way == "stages":
            chosen = divided(way, cut, args.workers)
            costs_of, plan = LayerCosts(workload, RankGrid(1, args.workers)), chosen.plan
            step = pipeline(costs_of, chosen.begins, plan.microbatches, plan.schedule)
            predicted = step.plan.seconds
            print(f"stages compute {1e3 * sum(step.computing):.0f} ms in all", file=sys.stderr)
        else:
            predicted = divided(way, workload, args.workers).plan.seconds
        took = found[way]
        first, middle, third = (1e3 * one for one in statistics.quantiles(took, n=4))
        off = 1e3 * predicted / middle - 1
        print(
            f"| {way} | {middle:.0f} ({first:.0f} - {third:.0f}) | {1e3 * predicted:.0f} "
            f"| {100 * off:+.0f} % |",
            flush=True,
        )


measure() if args.measure else main()
