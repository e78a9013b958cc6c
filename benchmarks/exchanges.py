"""What exchanges save on a slow link, and what they cost in accuracy.

    python benchmarks/exchanges.py                                      # CNTK's tables
    python benchmarks/exchanges.py --model perceptron --width 3072 --steps 12 --workers 4
    python benchmarks/exchanges.py --model resnet20 --steps 12 --workers 2 --mbit 0

Workers are hosts of their own, network namespaces, whose links carry --mbit Mbit/s each way (tc,
token bucket); each computes with one thread. A convolutional network, or a perceptron with two
hidden layers, learns the digits of scikit-learn. Speed is images per second against one worker;
error is the test set's after the same number of epochs at the same global batch, so that with exact
sums it would not change. With --steps nothing is tested, all exchanges take turns in one job, and
times are medians; resnet20 is that of CIFAR-10, on random images, for its speed only.

Writes a Markdown table and, with matplotlib (pip install matplotlib), a plot.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from dtk.bench.page import markdown_table

import hosts

parser = argparse.ArgumentParser(description="Speed and error by exchange on a limited link.")
parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
parser.add_argument("--mbit", type=int, default=100, help="of each link; 0: loopback, no limit")
parser.add_argument("--cores", type=float, help="that each worker's host computes with, as 0.5")
parser.add_argument("--model", choices=("convnet", "perceptron", "resnet20"), default="convnet")
parser.add_argument("--width", type=int, default=896, help="of the perceptron's layers")
parser.add_argument("--enlarge", type=int, default=1, help="the convnet's images: more to compute")
parser.add_argument("--rate", type=float, default=0.05, help="learning rate, with momentum 0.9")
parser.add_argument("--batch-size", type=int, default=64, help="the global batch")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--warm", type=int, default=1437, help="samples of the warm start")
parser.add_argument("--blocks", type=int, nargs="+", default=[256, 512, 1437])
parser.add_argument("--steps", type=int, default=0, help="measure so many, after one, in turns")
parser.add_argument("--rounds", type=int, default=5, help="turns")
parser.add_argument("--exchanges", nargs="+", help="some of those in the table, by name")
parser.add_argument("--output", type=Path, default=Path("exchanges"), help="folder of the results")
args = parser.parse_args()

TRAIN = 1437  # of 1797 images


def exchanges():
    """Name -> exchange."""
    from dtk.exchange import BlockMomentum, Delayed, Dense, ModelAveraging, Quantized, WarmStart

    found = {
        "dense": Dense(factors=False),
        "dense, factors": Dense(),
        "fp16": Dense("float16", factors=False),
        "8-bit": Quantized(8),
        "1-bit": Quantized(1),
        "1-bit, warm start": WarmStart(Quantized(1), args.warm),
        "1-bit, delayed": WarmStart(Delayed(Quantized(1)), args.warm),
        **{f"block momentum {size}": BlockMomentum(size) for size in args.blocks},
        "model averaging": ModelAveraging(max(1, args.blocks[0] // 4)),
    }
    return {n: found[n] for n in args.exchanges} if args.exchanges else found


def measure():
    """On every rank: train with each exchange; rank 0 prints what it found."""
    import dtk
    import keras
    import numpy as np
    from dtk.bench.models import resnet20
    from dtk.callbacks import CommunicationStats
    from sklearn.datasets import load_digits

    strategy = dtk.strategies.AllReduceStrategy()
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16 - 0.5).astype("float32"), labels[order]
    found = {}

    if args.model == "resnet20":
        images = np.random.default_rng(0).normal(size=(len(images), 32, 32, 3)).astype("float32")

    def perceptron():
        hidden = [keras.layers.Dense(args.width, activation="relu") for _ in range(2)]
        return keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])

    def convnet():
        def conv(filters, strides=1):
            return keras.layers.Conv2D(filters, 3, strides, padding="same", activation="relu")

        enlarge = [keras.layers.Reshape((8, 8, 1)), keras.layers.UpSampling2D(args.enlarge)]
        layers = [conv(64), conv(64), conv(128, strides=2)]
        head = [keras.layers.Flatten(), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((64,)), *enlarge, *layers, *head])

    def model_with(exchange):
        keras.utils.set_random_seed(1)
        strategy.exchange = exchange
        with strategy.scope():
            model = {
                "convnet": convnet,
                "perceptron": perceptron,
                "resnet20": lambda: resnet20(keras),
            }[args.model]()
            model.compile(
                keras.optimizers.SGD(args.rate, momentum=0.9),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        return model

    class Stopwatch(keras.callbacks.Callback):
        """Seconds of a step, without what `fit` does around the first and the last."""

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                self.began = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            float(logs["loss"])  # wait for the step
            if batch:
                self.per_step = (time.perf_counter() - self.began) / batch

    def fit(model, rows, epochs):
        watch = Stopwatch()
        began = time.perf_counter()
        history = model.fit(
            np.resize(images, (rows, *images.shape[1:])),
            np.resize(labels, rows),
            batch_size=args.batch_size,
            epochs=epochs,
            verbose=0,
            callbacks=[CommunicationStats(), watch] if args.steps else [CommunicationStats()],
        )
        if args.steps:
            return watch.per_step, history.history
        return time.perf_counter() - began, history.history

    for name, exchange in exchanges().items():
        if strategy.size == 1 and name != "dense":
            continue
        model = model_with(exchange)
        if args.steps:
            # A turn ends an epoch, and so a block: it must not do so before the block is full.
            block = getattr(exchange, "block_size", 0) // args.batch_size
            steps = max(args.steps, block) + 1
            found[name] = {"model": model, "steps": steps, "seconds": [], "bytes": [], "share": []}
            continue
        fit(model, args.batch_size, 1)  # traces
        model.set_weights(model_with(exchange).get_weights())
        seconds, history = fit(model, TRAIN, args.epochs)
        accuracy = model.evaluate(images[TRAIN:], labels[TRAIN:], verbose=0)[1]
        found[name] = {
            "images_per_second": TRAIN * args.epochs / seconds,
            "error": 100 * (1 - accuracy),
            "bytes": statistics.mean(history["comm_bytes"]),
            "share": statistics.mean(history["comm_share"]),
        }
    for turn in range(args.rounds + 1 if args.steps else 0):
        for result in found.values():
            seconds, history = fit(result["model"], result["steps"] * args.batch_size, 1)
            if turn:  # the first one traces
                result["seconds"].append(seconds)
                result["bytes"].append(history["comm_bytes"][0])
                result["share"].append(history["comm_share"][0])
    for result in found.values():
        result.pop("model", None)
    if strategy.is_chief:
        print("RESULT", json.dumps(found), flush=True)


def job(workers):
    """Run this script as a job; what its rank 0 measured."""
    threads = dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"), "1")
    return hosts.run(__file__, sys.argv[1:], workers, args.mbit, threads, cores=args.cores)


def setting():
    link = f"links of {args.mbit} Mbit/s (tc tbf)" if args.mbit else "loopback"
    cores = f"{args.cores} cores each" if args.cores else f"{os.cpu_count()} cores in all"
    wide = (64 * args.width + args.width**2 + 12 * args.width + 10) / 1e6
    convnet = (111_434 + 128 * 10 * (4 * args.enlarge) ** 2) / 1e6
    size = {"convnet": convnet, "perceptron": wide, "resnet20": 0.27}[args.model]
    return (
        f"{link}, one thread per worker, {cores}, {args.model} of {size:.2f} "
        f"M parameters, global batch {args.batch_size}"
    )


def table(by_workers):
    """Speed against one worker, and error, by exchange and number of workers."""
    base = by_workers[min(by_workers)]["dense"]["images_per_second"]
    counts = sorted(by_workers)
    rows = [("exchange", *(f"{n} worker{'s' * (n > 1)}" for n in counts), "sent/step")]
    for name, last in by_workers[max(counts)].items():
        of_counts = (by_workers[n].get(name) for n in counts)
        cells = (
            f"{cell['images_per_second'] / base:.2f} / {cell['error']:.2f}" if cell else ""
            for cell in of_counts
        )
        rows.append((name, *cells, f"{last['bytes'] / 1e3:.1f} kB"))
    return markdown_table(rows)


def plot(by_workers, path):
    """Error over speed, a point for each job."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    base = by_workers[min(by_workers)]["dense"]["images_per_second"]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for n, found in sorted(by_workers.items()):
        axes.scatter(
            [cell["images_per_second"] / base for cell in found.values()],
            [cell["error"] for cell in found.values()],
            label=f"{n} workers" if n > 1 else "1 worker",
        )
        for name, cell in found.items():
            axes.annotate(name, (cell["images_per_second"] / base, cell["error"]), fontsize=6)
    axes.set(xlabel="speed against one worker", ylabel="test error, %", title=setting())
    axes.title.set_fontsize(7)
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def times(found):
    """Milliseconds of a step by exchange, against dense."""
    rows = [
        ("exchange", "ms per step (quartiles)", "dense / this", "sent per step", "communicating")
    ]
    dense = statistics.median(found["dense"]["seconds"])
    for name, cell in found.items():
        seconds = cell["seconds"] if len(cell["seconds"]) > 1 else cell["seconds"] * 2
        low, middle, high = (1000 * q for q in statistics.quantiles(seconds, n=4))
        rows.append(
            (
                name,
                f"{middle:.0f} ({low:.0f} - {high:.0f})",
                f"{1000 * dense / middle:.1f}",
                f"{statistics.median(cell['bytes']) / 1e6:.3f} MB",
                f"{100 * statistics.median(cell['share']):.0f} %",
            )
        )
    return markdown_table(rows)


def main():
    if args.steps:
        lines = []
        for workers in args.workers:
            lines += [f"{workers} workers, {setting()}", "", *times(job(workers)), ""]
    else:
        by_workers = {workers: job(workers) for workers in args.workers}
        lines = [f"speed against one worker / test error in %; {setting()}", ""]
        lines += table(by_workers)
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "exchanges.json").write_text(json.dumps(by_workers, indent=1))
        plot(by_workers, args.output / "exchanges.svg")
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "exchanges.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if os.environ.get("DTK_BENCHMARK_RANK"):
    measure()
else:
    main()
