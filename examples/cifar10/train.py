"""CNTK's networks for CIFAR-10, by its recipes: ConvNet, VGG-9, ResNet-20 and 110, BN-Inception.

    python examples/cifar10/train.py --model convnet
    dtk run -n 4 examples/cifar10/train.py --model resnet20 --exchange 1bit --warm-start 100000
    dtk run -n 4 examples/cifar10/train.py --model resnet110 --batch-per-worker 128
    dtk run -n 2 examples/cifar10/train.py --model convnet --block-momentum 2000 --data digits
    mpirun -np 2 python examples/cifar10/train.py --model vgg9 --checkpoints vgg9
    dtk run -n 2 examples/cifar10/train.py --synthetic --epochs 2       # timing, without the data

The global batch, the rate per image and the momentum are the recipe's for any number of workers, so
that all of them end as one process would. With --batch-per-worker the batch grows with the workers,
and so does the rate, after a warm-up (Goyal et al. 2017). With --block-momentum each worker takes
steps of its own, with norms of its own rows.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import dtk
import keras
from dtk.callbacks import Checkpoint, CommunicationStats, LearningRateScaling, ProgressPrinter
from dtk.exchange import BlockMomentum, WarmStart, parse
from dtk.schedules import momentum_from_time_constant

import data
from networks import NETWORKS, Style
from recipes import RECIPES, sgd

parser = argparse.ArgumentParser(description="Train a network of CNTK's on CIFAR-10.")
parser.add_argument("--model", choices=NETWORKS, default="resnet20")
parser.add_argument("--data", choices=data.NAMES, default="cifar10")
parser.add_argument("--synthetic", action="store_true", help="--data synthetic: timing only")
parser.add_argument("--images", type=int, help="train with the first so many; 1024 synthetic ones")
parser.add_argument("--epochs", type=int, help="in place of the recipe's")
parser.add_argument("--stretch", action="store_true", help="fit the recipe's rates into --epochs")
parser.add_argument("--batch-size", type=int, help="global batch, in place of the recipe's")
parser.add_argument("--batch-per-worker", type=int, help="the batch grows with the workers")
parser.add_argument("--warmup-epochs", type=float, default=5, help="with --batch-per-worker")
parser.add_argument("--exchange", default="none", help="none, fp16, 1bit ... of dtk.exchange")
parser.add_argument("--warm-start", type=int, default=0, help="images before --exchange begins")
parser.add_argument("--block-momentum", type=int, metavar="BLOCK", help="images in a block")
parser.add_argument("--local-norm", action="store_true", help="norms of a worker's own rows")
parser.add_argument("--checkpoints", metavar="DIR", help="save there, and resume from there")
parser.add_argument("--seed", type=int, default=1, help="of weights and dropout")
parser.add_argument("--test-at-end", action="store_true", help="and not after each epoch")
parser.add_argument("--result", type=Path, help="rank 0 writes speed and error there, as JSON")
args = parser.parse_args()
if args.block_momentum and args.exchange != "none":
    parser.error("--block-momentum sends weights and no gradients: leave out --exchange")
if args.batch_size and args.batch_per_worker:
    parser.error("--batch-size is of all workers; give it or --batch-per-worker")

NORM_SAMPLES = 4096  # time constant of moving statistics


class Stopwatch(keras.callbacks.Callback):
    """Images per second of each epoch, without the first step, which is traced, and without tests.

    Args:
        rows: Images of an epoch.
        batch_size: Images of a step.
    """

    def __init__(self, rows, batch_size):
        super().__init__()
        self.rows, self.batch_size = rows, batch_size
        self.speeds = []
        self._began = None

    def on_train_batch_end(self, batch, logs=None):
        if self._began is None:
            float(logs["loss"])  # wait for the step
            self._began, self._rows = time.perf_counter(), self.rows - self.batch_size

    def on_epoch_begin(self, epoch, logs=None):
        self._close()
        if self.speeds:
            self._began, self._rows = time.perf_counter(), self.rows

    def on_test_begin(self, logs=None):
        self._close()

    def on_train_end(self, logs=None):
        self._close()

    def _close(self):
        if self._began is not None and self._rows > 0:
            self.speeds.append(self._rows / (time.perf_counter() - self._began))
            self._began = None


exchange = BlockMomentum(args.block_momentum) if args.block_momentum else args.exchange
if args.warm_start:
    exchange = WarmStart(parse(exchange), args.warm_start)
if exchange == "none":
    strategy = dtk.auto_strategy()
else:
    strategy = dtk.strategies.AllReduceStrategy(exchange=exchange)

images = data.load("synthetic" if args.synthetic else args.data, strategy, args.images)
rows = len(images.train[0])
recipe = RECIPES[args.model]
epochs = args.epochs or recipe.epochs
if args.stretch:
    recipe = recipe.stretched(epochs)
batch_size = args.batch_size or recipe.minibatch
if args.batch_per_worker:
    batch_size = args.batch_per_worker * strategy.size
blocks = bool(args.block_momentum) and strategy.size > 1
scaled = bool(args.batch_per_worker) and not blocks
if strategy.is_chief:
    print(f"{args.model} on {images.title}: {rows} images, global batch {batch_size}", flush=True)

keras.utils.set_random_seed(args.seed)
with strategy.scope():
    model = NETWORKS[args.model](
        Style(
            l2=recipe.l2,
            norm_momentum=momentum_from_time_constant(NORM_SAMPLES, batch_size),
            synchronized=not (args.local_norm or blocks),
            size=images.train[0].shape[1],
        )
    )
    optimizer, callbacks = sgd(recipe, batch_size, rows, strategy.size, blocks, scaled)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

if scaled:
    callbacks.append(LearningRateScaling(warmup_epochs=args.warmup_epochs))
if args.checkpoints:
    monitor = None if args.test_at_end else "val_accuracy"
    callbacks.append(Checkpoint(args.checkpoints, monitor=monitor))
stopwatch = Stopwatch(rows, batch_size)
callbacks += [CommunicationStats(), ProgressPrinter(freq=None), stopwatch]

test_set = data.test_set(images, batch_size)
history = model.fit(
    data.training_set(images, batch_size),
    validation_data=None if args.test_at_end else test_set,
    shuffle=False,  # the dataset shuffles itself
    epochs=epochs,
    verbose=0,
    callbacks=callbacks,
).history

_, accuracy = model.evaluate(test_set, verbose=0)
error = 100 * (1 - accuracy)
if strategy.is_chief:
    speed = f"{statistics.median(stopwatch.speeds):.0f}" if stopwatch.speeds else "?"
    sent = "whole gradients" if exchange == "none" else exchange
    print(
        f"{model.name}: test accuracy {accuracy:.4f}, error {error:.2f} % on {images.title}; "
        f"{strategy.size} worker(s), {sent}, {speed} images/s"
    )
if strategy.is_chief and args.result:
    found = {
        "data": images.title,
        "images": rows,
        "batch_size": batch_size,
        "epochs": epochs,
        "workers": strategy.size,
        "error": error,
        "images_per_second": stopwatch.speeds,
        "bytes_per_step": statistics.mean(history.get("comm_bytes", [0.0])),
        "communicating": statistics.mean(history.get("comm_share", [0.0])),
    }
    args.result.write_text(json.dumps(found) + "\n")
