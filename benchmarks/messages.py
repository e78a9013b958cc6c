"""What a small all-reduce takes in a graph, and what a call from Python adds to it.

    dtk run -n 2 benchmarks/messages.py
    mpirun -np 2 --map-by core --bind-to core python benchmarks/messages.py

One call makes 1, 2, 4 ... all-reduces of 4 kB, each of what the one before gave. A line through
these times has a slope, which is a message: what a synchronized norm waits for, say; and what is
left for none, which is the call. The same graph over dtk's `null` communicator, which sends
nothing, tells what dtk's own ops take of both.
"""

import argparse
import time

import numpy as np
import tensorflow as tf
from dtk.bench.report import quartiles
from dtk.communicators.local import NullCommunicator
from dtk.strategies import AllReduceStrategy

KILOBYTES = 4
MESSAGES = (1, 2, 4, 8, 16)

parser = argparse.ArgumentParser(prog="messages", description="What a small all-reduce takes.")
parser.add_argument("--calls", type=int, default=100, help="of a turn")
parser.add_argument("--rounds", type=int, default=7, help="turns of each")


def chain(communicator, device, count):
    """A function that makes so many all-reduces, one after the other."""
    with tf.device(device):
        values = tf.ones(KILOBYTES * 250)

    @tf.function(jit_compile=False)
    def step():
        result = values
        for _ in range(count):
            result = communicator.allreduce(result, "mean")
        return result[0]

    return step


def clocked(step, calls):
    """Milliseconds of a call, mean of many."""
    began = time.perf_counter()
    for _ in range(calls):
        step().numpy()
    return 1e3 * (time.perf_counter() - began) / calls


def main():
    args = parser.parse_args()
    if args.calls < 1 or args.rounds < 1:
        parser.error(f"--calls {args.calls} --rounds {args.rounds}: expected 1 or more")
    strategy = AllReduceStrategy()
    world, (device,) = strategy.communicator, strategy.extended.worker_devices
    contenders = {world.name: world, "null": NullCommunicator(0, world.size)}
    steps = {
        name: [chain(communicator, device, count) for count in MESSAGES]
        for name, communicator in contenders.items()
    }
    lines = {name: [] for name in steps}
    for number in range(args.rounds + 1):
        for name, of_counts in steps.items():
            world.barrier()
            times = [clocked(step, args.calls) for step in of_counts]
            if number:  # the first one traces
                lines[name].append(np.polyfit(MESSAGES, times, 1))
    if strategy.is_chief:
        print(f"{world.size} ranks, {KILOBYTES} kB, {args.rounds} rounds: medians (quartiles), ms")
        for name, found in lines.items():
            message, call = (told(column) for column in zip(*found, strict=True))
            print(f"{name:12} a message {message}   a call without one {call}")


def told(values):
    low, middle, high = quartiles(values)
    return f"{middle:.3f} ({low:.3f} - {high:.3f})"


main()
