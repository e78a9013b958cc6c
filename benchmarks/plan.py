"""What `dtk plan` predicts against what is measured, on links of several speeds.

    python benchmarks/plan.py                                # everything, then the table
    python benchmarks/plan.py --only calibrate --workers 4   # a part of it at a time ...
    python benchmarks/plan.py --only measure --workers 4 --mbit 100
    python benchmarks/plan.py --only table                   # ... and the table of what there is

Calibrating is `dtk bench --json` on loopback, as a user would, with as many workers as are then
predicted: they share this machine's cores. The plan is made from that file and the speed that tc
gives the links; nothing of the runs that are predicted goes into it. In those, workers are hosts of
their own (network namespaces, tc tbf), each with one thread. One worker sends nothing: its time is
that of plain Keras, and is predicted by itself.

Needs root and iproute2. Writes JSON, and the table as Markdown.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import hosts

parser = argparse.ArgumentParser(description="Predicted and measured time of a step.")
parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
parser.add_argument("--mbit", type=int, nargs="+", default=[50, 100, 1000], help="of each link")
parser.add_argument("--model", default="transformer", help="one of `dtk bench`")
parser.add_argument("--batch-size", type=int, default=16, help="per worker")
parser.add_argument("--block-steps", type=int, default=4, help="steps of a block")
parser.add_argument("--steps", type=int, default=8, help="of a turn; a multiple of a block's")
parser.add_argument("--rounds", type=int, default=5, help="turns of each")
parser.add_argument("--only", choices=("calibrate", "measure", "table"))
parser.add_argument("--output", type=Path, default=Path("plan"), help="folder of the results")
args = parser.parse_args()

EXCHANGES = ("dense", "fp16", "1bit", "block momentum")


def measure():
    """On every rank: train with each exchange; rank 0 prints what a step took."""
    import dtk
    import keras
    from dtk.bench.models import PROBLEMS
    from dtk.bench.turns import order
    from dtk.bench.variant import Fit
    from dtk.bench.worker import clock
    from dtk.exchange import BlockMomentum, parse

    strategy = dtk.strategies.AllReduceStrategy()
    problem = PROBLEMS[args.model]
    rows = args.batch_size * strategy.size
    known = {"dense": None, "block momentum": BlockMomentum(args.block_steps * rows)}

    def variant(name):
        strategy.exchange = parse(known.get(name, name))
        with strategy.scope():
            model = problem.compiled(keras)
        x, y = problem.data((args.steps + 1) * rows)
        data = {"x": x, "y": y, "batch_size": rows}
        return Fit(name, model, data, args.steps, strategy.communicator)

    found = {name: [] for name in EXCHANGES}
    variants = [variant(name) for name in EXCHANGES]
    for number in range(args.rounds + 1):
        for one in order(variants, number):
            seconds = strategy.communicator.allgather_object(clock(one.measure)["seconds"])
            if number:  # in the first one it is traced
                found[one.name].append(statistics.mean(seconds))
    if strategy.is_chief:
        print("RESULT", json.dumps(found), flush=True)


def measured(workers, mbit):
    """Run this script as a job on links of so many Mbit/s, and keep what its rank 0 printed."""
    burst = hosts.burst_of(mbit)
    found = hosts.run(__file__, sys.argv[1:], workers, mbit, hosts.ONE_THREAD, burst=burst)
    path("measured", workers, mbit).write_text(json.dumps(found))


def calibrate(workers):
    """`dtk bench` with so many workers on loopback."""
    options = f"-n {workers} --model {args.model} --batch-size {args.batch_size} --json"
    options = [*shlex.split(options), str(path("bench", workers))]
    command = [sys.executable, "-m", "dtk.cli.main", "bench", *options]
    subprocess.run(command, check=True, env=os.environ | hosts.ONE_THREAD)


def path(*names):
    args.output.mkdir(parents=True, exist_ok=True)
    return args.output / f"{'-'.join(map(str, names))}.json"


def predicted(workers, mbit):
    """Seconds of a step, by exchange, from the calibration and tc's numbers."""
    import dataclasses

    from dtk.bench.results import read
    from dtk.planning.calibration import calibrated
    from dtk.planning.inputs import Cluster, Link
    from dtk.planning.plan_methods import METHODS

    known = calibrated(read(path("bench", workers)), args.model)
    job = dataclasses.replace(known.job, block_steps=args.block_steps)
    cluster = Cluster(network=Link(0.0, mbit * 1e6 / 8), software=known.software)
    return {method.name: method.cost(job, cluster, workers).seconds for method in METHODS}


def table():
    """A line for each run that there is."""
    from dtk.bench.page import markdown_table
    from dtk.bench.report import quartiles

    rows = [("workers", "links", "exchange", "measured, ms (quartiles)", "predicted", "error")]
    errors = []
    for workers in args.workers:
        for mbit in args.mbit:
            if not (path("measured", workers, mbit).exists() and path("bench", workers).exists()):
                continue
            told = predicted(workers, mbit)
            for name, seconds in json.loads(path("measured", workers, mbit).read_text()).items():
                low, middle, high = (1000 * q for q in quartiles(seconds))
                errors.append(1000 * told[name] / middle - 1)
                measured_ms = f"{middle:.0f} ({low:.0f} - {high:.0f})"
                cells = (measured_ms, f"{1000 * told[name]:.0f}", f"{100 * errors[-1]:+.0f} %")
                rows.append((str(workers), f"{mbit} Mbit/s", name, *cells))
    within = sum(abs(error) <= 0.15 for error in errors)
    return [*markdown_table(rows), "", f"{within} of {len(errors)} within 15 %."]


def main():
    for workers in args.workers:
        if args.only in (None, "calibrate"):
            calibrate(workers)
        for mbit in args.mbit if args.only in (None, "measure") else ():
            measured(workers, mbit)
    if args.only in (None, "table"):
        lines = table()
        (args.output / "plan.md").write_text("\n".join(lines) + "\n")
        print("\n".join(lines))


if os.environ.get("DTK_BENCHMARK_RANK"):
    measure()
else:
    main()
