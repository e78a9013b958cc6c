"""CNTK's table for this machine: network x workers x exchange, as speed / error in percent.

    python benchmarks/cntk_table.py                                    # days, on CIFAR-10
    python benchmarks/cntk_table.py --models convnet resnet20 --workers 1 2 --epochs 4 --rounds 3
    python benchmarks/cntk_table.py --models convnet --workers 2 --exchange --blocks 100 1000 2000
    python benchmarks/cntk_table.py --mbit 100                         # hosts with slow links

Each cell is a training of its own, examples/cifar10/train.py under `dtk run`, by CNTK's recipe at
one global batch for any number of workers. An exchange with "warm" before its name begins after
--warm-start images. Every worker computes with --threads threads, so one worker leaves cores idle
where there are more: a worker stands for a node. Speed is images per second against one worker, the
median over all epochs of all rounds; jobs take turns, so that whatever else the machine does falls
on all alike. Error is the test set's at the end, the median over rounds, each with its own seed.

Data is CIFAR-10 where Keras finds it on this machine, and otherwise scikit-learn's digits,
enlarged; --data teacher makes images. Every table says which. With --blocks there is a second
table, by the size of the block, for block momentum on the most workers. Results are kept in
cntk_table.json in --output: a call that is repeated, or asks for more, trains only what is missing
there.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from dtk.bench.page import markdown, show

import hosts

TRAIN = Path(__file__).resolve().parents[1] / "examples" / "cifar10" / "train.py"
MODELS = {"convnet": 100, "vgg9": 30, "resnet20": 100, "resnet110": 25, "bn-inception": 25}

parser = argparse.ArgumentParser(description="CNTK's table of speed and error, for this machine.")
parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
parser.add_argument("--exchange", nargs="*", default=["none", "1bit"], help='such as "warm 1bit"')
parser.add_argument("--blocks", type=int, nargs="*", default=[], help="sizes, for block momentum")
parser.add_argument("--warm-start", type=int, default=0, help="images before warm ones begin")
parser.add_argument("--local-norm", action="store_true", help="norms of a worker's rows, as CNTK")
parser.add_argument("--epochs", type=int, help="for all models, in place of CNTK's table's")
parser.add_argument("--stretch", action="store_true", help="fit the recipes' rates into them")
parser.add_argument(
    "--data", choices=("auto", "cifar10", "digits", "teacher", "synthetic"), default="auto"
)
parser.add_argument("--synthetic", action="store_true", help="--data synthetic: speed only")
parser.add_argument("--images", type=int, help="train with the first so many")
parser.add_argument("--batch-size", type=int, help="global batch, in place of the recipe's")
parser.add_argument("--rounds", type=int, default=1, help="trainings of each cell")
parser.add_argument("--threads", type=int, default=1, help="of each worker")
parser.add_argument("--mbit", type=int, default=0, help="of each worker's link; 0: loopback")
parser.add_argument("--output", type=Path, default=Path("cntk_table"), help="folder of the results")


def data_here(args):
    """What to train on: CIFAR-10 if it need not be downloaded."""
    if args.synthetic:
        return "synthetic"
    if args.data != "auto":
        return args.data
    folder = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras")) / "datasets"
    return "cifar10" if any(folder.glob("cifar-10-batches-py*")) else "digits"


def setting_of(args):
    """What must be equal for trainings to stand in one table."""
    return {
        "data": data_here(args),
        "images": args.images,
        "batch_size": args.batch_size,
        "warm_start": args.warm_start,
        "stretch": args.stretch,
        "local_norm": args.local_norm,
        "threads": args.threads,
        "mbit": args.mbit,
        "cores": os.cpu_count(),
    }


def cells(args):
    """Every training: model, epochs, workers and what is sent, a key of the file of results."""
    for model in args.models:
        epochs = args.epochs or MODELS[model]
        yield model, epochs, 1, "none"  # what speeds are relative to
        for workers in sorted(set(args.workers) - {1}):
            for exchange in args.exchange:
                yield model, epochs, workers, exchange
        for size in args.blocks if max(args.workers) > 1 else ():
            yield model, epochs, max(args.workers), f"block {size}"


def train(cell, setting, seed):
    """Run one training; what its rank 0 found."""
    model, epochs, workers, exchange = cell
    options = [
        "--model",
        model,
        "--epochs",
        str(epochs),
        "--data",
        setting["data"],
        "--seed",
        str(seed),
        "--test-at-end",
    ]
    for name in ("images", "batch_size"):
        if setting[name]:
            options += [f"--{name.replace('_', '-')}", str(setting[name])]
    options += [
        f"--{name.replace('_', '-')}" for name in ("stretch", "local_norm") if setting[name]
    ]
    kind, _, rest = exchange.rpartition(" ")
    options += ["--block-momentum" if kind == "block" else "--exchange", rest]
    if kind == "warm":
        options += ["--warm-start", str(setting["warm_start"])]
    threads = dict.fromkeys(hosts.THREADS, str(setting["threads"]))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        options += ["--result", str(result)]
        hosts.dtk("run", [str(TRAIN), *options], workers, setting["mbit"], threads)
        if not result.exists():  # where data is missing, it has said what to do
            sys.exit(f"{' '.join(options)} left no result")
        return json.loads(result.read_text())


def read(path, setting):
    """Results of earlier calls, by cell.

    A file of another setting is refused: its numbers would not belong into one table.
    """
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    if kept["setting"] != setting:
        other = {name: kept["setting"].get(name) for name in setting}
        differs = [name for name in setting if other[name] != setting[name]]
        before = ", ".join(f"{name}={other[name]}" for name in differs)
        now = ", ".join(f"{name}={setting[name]}" for name in differs)
        sys.exit(f"{path} was measured with {before}, and {now} is wanted; give another --output")
    return {tuple(row["cell"]): row["runs"] for row in kept["rows"]}


def write(path, setting, found):
    """Replace the file as a whole, so that a call that is ended leaves the last one."""
    rows = [{"cell": cell, "runs": runs} for cell, runs in found.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")
    new.replace(path)


def measure(args, path, setting):
    """Train what is missing, round by round; every result so far, by cell."""
    found = read(path, setting)
    for number in range(args.rounds):
        for cell in cells(args):
            if len(found.get(cell, [])) <= number:
                print(f"round {number + 1}: {name_of(cell)} ...", flush=True)
                found.setdefault(cell, []).append(train(cell, setting, number + 1))
                write(path, setting, found)
    return found


def name_of(cell):
    model, epochs, workers, exchange = cell
    return f"{model}, {epochs} epochs, {workers} worker{'s' * (workers > 1)}, {exchange}"


def speeds(runs):
    return [speed for run in runs for speed in run["images_per_second"]]


def relative(found, cell):
    """Speed against one worker that trains the same."""
    alone = speeds(found[(*cell[:2], 1, "none")])
    return statistics.median(speeds(found[cell])) / statistics.median(alone)


def error(runs, setting):
    """Test error in percent, the median of rounds; random images have none."""
    if setting["data"] == "synthetic":
        return "-"
    return f"{statistics.median(run['error'] for run in runs):.2f}"


def spread(values, digits=1):
    if len(values) == 1:
        values = values * 2
    # "inclusive": quartiles of two or three values lie between them
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def by_nodes(args, found, setting):
    """CNTK's table: a row for each network, a column for each number of workers and exchange."""
    columns = [(1, "none")]
    columns += [(n, sent) for n in sorted(set(args.workers) - {1}) for sent in args.exchange]
    titles = [f"{n}{'' if sent == 'none' else f' + {sent}'}" for n, sent in columns]
    titles[0] = "1 worker"
    rows = [("network (epochs)", *titles)]
    for model in args.models:
        epochs = args.epochs or MODELS[model]
        of_model = [(model, epochs, *column) for column in columns]
        rows.append(
            (
                f"{model} ({epochs})",
                *(f"{relative(found, c):.2f} / {error(found[c], setting)}" for c in of_model),
            )
        )
    return rows


def by_blocks(args, found, setting, model):
    """Block momentum on the most workers, by block size: what it does to time and error."""
    epochs = args.epochs or MODELS[model]
    rows = [("block, images", "error, %", "seconds of an epoch (quartiles)", "speed")]
    alone = (model, epochs, 1, "none")
    blocks = [(model, epochs, max(args.workers), f"block {size}") for size in args.blocks]
    for cell in (alone, *blocks):
        runs = found[cell]
        title = "1 worker" if cell == alone else cell[-1].removeprefix("block ")
        seconds = [runs[0]["images"] / speed for speed in speeds(runs)]
        of_error = error(runs, setting)
        rows.append((title, of_error, spread(seconds, 2), f"{relative(found, cell):.2f}"))
    return rows


def details(args, found, setting):
    """What the ratios are made of: every cell, with its spread."""
    rows = [("training", "rounds", "images/s (quartiles)", "errors, %", "sent/step", "sending")]
    for cell in cells(args):
        runs = found[cell]
        rows.append(
            (
                name_of(cell),
                str(len(runs)),
                spread(speeds(runs)),
                ", ".join(error([run], setting) for run in runs),
                f"{statistics.mean(run['bytes_per_step'] for run in runs) / 1e3:.1f} kB",
                f"{100 * statistics.mean(run['communicating'] for run in runs):.0f} %",
            )
        )
    return rows


def notes(found, setting):
    (title,) = {run["data"] for runs in found.values() for run in runs}
    count = next(iter(found.values()))[0]["images"]
    link = f"links of {setting['mbit']} Mbit/s" if setting["mbit"] else "loopback"
    return [
        f"Data: {title}, {count} training images. {setting['cores']} cores, {setting['threads']} "
        f"thread(s) for each worker, {link}.",
    ]


def main():
    args = parser.parse_args()
    for exchange in args.exchange:
        kind, _, _ = exchange.rpartition(" ")
        if kind not in ("", "warm") or (kind == "warm" and not args.warm_start):
            parser.error(f'--exchange "{exchange}": give a name, or "warm NAME" and --warm-start')
    setting = setting_of(args)
    found = measure(args, args.output / "cntk_table.json", setting)
    tables = []
    if args.exchange:
        tables.append(
            ("speed against one worker / test error in %", by_nodes(args, found, setting))
        )
    for model in args.models if args.blocks else ():
        title = f"block momentum, {model}, {max(args.workers)} workers"
        tables.append((title, by_blocks(args, found, setting, model)))
    tables.append(("each training", details(args, found, setting)))
    here = {cell: found[cell] for cell in cells(args)}
    (args.output / "cntk_table.md").write_text(markdown(tables, notes(here, setting)))
    show(tables, notes(here, setting))


if __name__ == "__main__":
    main()
