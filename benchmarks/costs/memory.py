"""Peak memory of this process: plain `fit`, or `fit` of one worker, on equal arrays and rows."""

import contextlib
import re
from pathlib import Path

import keras
import tensorflow as tf
from dtk import quiet
from dtk.communicators import buckets

from models import PROBLEMS


def measure(setting, strategy):
    if strategy is None:
        with quiet.device_start():  # as a strategy does
            tf.config.list_logical_devices()
    problem = PROBLEMS[setting.model]
    steps, batch = setting.steps + 1, setting.batch_size * (strategy.size if strategy else 1)
    x, y = problem.data(steps * setting.batch_size * setting.workers)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = problem.compiled(keras)
    before = peak()
    model.fit(x[: steps * batch], y[: steps * batch], batch_size=batch, verbose=0)
    found = {"peak": peak(), "before": before}
    if strategy is None:
        return found
    told = strategy.communicator.allgather_object(found)
    worst = max(told, key=lambda one: one["peak"])
    gradients = [tf.convert_to_tensor(v) for v in model.trainable_variables]
    communicator = strategy.communicator
    bucket = buckets.limit_for(gradients, communicator.bucket_bytes, communicator.costs)
    return {**worst, "bucket": bucket}


def peak():
    """Bytes this process has held in memory at most, by the kernel's own count."""
    kilobytes = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]
    return 1024 * int(kilobytes)
