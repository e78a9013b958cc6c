"""What each thing that dtk adds costs, as a ratio to a peer in the same run.

    python benchmarks/costs                                             # all rows
    python benchmarks/costs --only norms --communicator collective horovod-mpi
    python benchmarks/costs --only memory input --rounds 3 --output costs.md

| row | what it compares |
|---|---|
| alone | `fit` in a world of one, with plain `fit` |
| loop | `fit` of several workers, with a loop by hand that makes the same reductions |
| ends | `fit`, with the steps that it is made of |
| parts | `fit` of several workers, with less and less of what it does |
| norms | synchronized BatchNormalization, with norms of each worker's own rows |
| checks | comparing ranks, with an epoch of 100 steps; metrics, with none |
| memory | a worker's peak, with that of a process of plain `fit` |
| input | reading rows in several ways, with one batch that stays in memory |

Peers take turns, so that whatever else the machine does falls on all alike; each process computes
with one thread. Tables hold medians (and quartiles) over rounds, of ratios within each round.
benchmarks/results/costs.md has what was measured.
"""

import argparse
from pathlib import Path

from dtk.bench.turns import order

import jobs
import report
from models import PROBLEMS

ON_WORKERS = ("loop", "ends", "parts", "norms", "checks", "input")
ROWS = ("alone", "loop", "ends", "parts", "norms", "checks", "memory", "input")
MB = 1e6
PEAK = 1.15  # of plain `fit`, and one bucket

parser = argparse.ArgumentParser(prog="costs", description="What each thing that dtk adds costs.")
parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, help="some of the rows")
parser.add_argument("--model", choices=PROBLEMS, default="resnet20")
parser.add_argument("--batch-size", type=int, default=32, help="per worker")
parser.add_argument("--rounds", type=int, default=5, help="turns of each, after one not counted")
parser.add_argument("--steps", type=int, default=20, help="of a turn, after one not counted")
parser.add_argument("-n", "--workers", type=int, default=2)
parser.add_argument("--communicator", nargs="+", choices=jobs.COMMUNICATORS, default=[jobs.OWN])
parser.add_argument("--output", type=Path, metavar="FILE", help="for the tables, in Markdown")


def memory(setting, communicator):
    """Peaks of fresh processes, plain ones and workers in turns, for a large model and the usual.

    Returns the lines of a table.
    """
    rows = []
    for model in dict.fromkeys(("mlp", setting.model)):
        asked = setting._replace(model=model)
        found = {"plain": [], "dtk": []}
        for number in range(setting.rounds):
            for kind in order(list(found), number):
                where = communicator if kind == "dtk" else None
                found[kind].append(jobs.run(["memory"], asked, where)["memory"])
        peaks = {kind: [one["peak"] for one in said] for kind, said in found.items()}
        bucket = found["dtk"][0]["bucket"]
        # In the unit of the ratio: a bucket is so much of plain `fit`'s peak.
        most = report.at_most(PEAK + bucket / report.median(peaks["plain"]))
        cells = report.compared(peaks["dtk"], peaks["plain"], most, 1 / MB)
        before = (report.spread([one["before"] for one in found[kind]], 1 / MB) for kind in found)
        rows.append([model, *cells[:2], *before, f"{bucket / MB:.1f}", *cells[2:]])
    header = "model|`fit` under dtk, peak, MB|plain `fit`, peak, MB|plain, before `fit`|"
    header += f"dtk, before `fit`|a bucket, MB|dtk / plain|target: {PEAK} + bucket / plain|"
    return report.markdown(header, rows)


def measured(args):
    """Yields the lines of all tables."""
    setting = jobs.Setting(args.model, args.batch_size, args.steps, args.rounds, args.workers)
    each = f"batch {args.batch_size} and one thread per worker"
    yield f"{args.model}, {each}, {args.rounds} rounds of {args.steps} steps: medians (quartiles)"
    if "alone" in args.only:
        yield from ("", "## alone", "", *jobs.run(["alone"], setting)["alone"])
    for communicator in args.communicator:
        where = f"{args.workers} workers, {communicator}"
        asked = [name for name in ON_WORKERS if name in args.only]
        found = jobs.run(asked, setting, communicator) if asked else {}
        if "memory" in args.only:
            found["memory"] = memory(setting, communicator)
        for name in ROWS:
            if name in found:
                yield from ("", f"## {name}: {where}", "", *found[name])


def main():
    args = parser.parse_args()
    for name in ("batch_size", "rounds", "steps", "workers"):
        least = 2 if name == "workers" else 1
        if getattr(args, name) < least:
            option = name.replace("_", "-")
            parser.error(f"--{option} {getattr(args, name)}: expected {least} or more")
    lines = []
    for line in measured(args):
        print(line, flush=True)
        lines.append(line)
    if args.output:
        args.output.write_text("\n".join([*lines, ""]))


main()
