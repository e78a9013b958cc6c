"""A job that predicts to disk, and of which rank 1 is killed by itself after some batches.

dtk run -n 2 tests/inference/killed_job.py DIRECTORY AFTER
"""

import os
import signal
import sys

import dtk

directory, after = sys.argv[1], int(sys.argv[2])
strategy = dtk.auto_strategy()

from inference import bodies  # noqa: E402

with strategy.scope():
    model = bodies.model()
arrays, read = bodies.data(), []


def batch(index):
    read.append(index)
    if strategy.rank == 1 and len(read) > after:
        os.kill(os.getpid(), signal.SIGKILL)
    rows = slice(index * bodies.BATCH, (index + 1) * bodies.BATCH)
    return ({name: array[rows] for name, array in arrays.items()},)


steps = -(-bodies.ROWS // bodies.BATCH)
dtk.inference.predict_to_disk(model, batch, directory, steps=steps, rows_per_file=bodies.BATCH)
