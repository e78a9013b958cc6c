"""What several tests of parameter servers use, most of it on the chief."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time

import keras
import psutil


def task(role, index):
    """The process of a task of this job."""
    mine = os.environ["TF_CONFIG"]
    cluster = json.loads(mine)["cluster"]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError):
            config = json.loads(process.environ().get("TF_CONFIG", "{}"))
            here = config.get("task") == {"type": role, "index": index}
            if here and config.get("cluster") == cluster and process.status() != "zombie":
                return process
    raise LookupError(f"no process for {role} {index}")


def line(rate=0.01, inputs=3):
    """A model whose gradient is the same whatever its weights: mean(x) for y = w x."""
    model = keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(rate), loss=lambda y, prediction: prediction)
    return model


@contextlib.contextmanager
def partitioned(strategy, parts, rows=1000):
    """Cut what has at least so many rows into parts, under a strategy of this process."""

    def cut(shape, dtype, axis=0):
        return [parts if shape[0] >= rows else 1] + [1] * (len(shape) - 1)

    if strategy is not None:
        strategy.extended._variable_partitioner = cut
    try:
        yield
    finally:
        if strategy is not None:
            strategy.extended._variable_partitioner = None


@contextlib.contextmanager
def exchanging(strategy, exchange):
    """Under a strategy of this process, which has none otherwise; yield what workers moved."""
    before = [] if strategy is None else strategy.traffic
    if strategy is not None:
        strategy.exchange = exchange
    moved = []
    try:
        yield moved
    finally:
        if strategy is not None:
            strategy.exchange = None
            moved += [
                {name: after[name] - old[name] for name in after}
                for after, old in zip(strategy.traffic, before, strict=True)
            ]


def mistake(module, name):
    """Class, message and notes of what one of a module's MISTAKES raises."""
    try:
        importlib.import_module(module).MISTAKES[name][0]()
    except Exception as error:
        return type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", [])])
    return "nothing", ""


def check_mistake(pool, module, name):
    """Make one of a module's MISTAKES on the chief: what to call, and what it raises and says."""
    _, kind, *parts = sys.modules[module].MISTAKES[name]
    ((raised, text),) = pool.run(mistake, module, name)
    assert raised == kind.__name__, text
    for part in parts:
        assert part in text, text


class LostWorker:
    """A worker that is killed in the middle, and started again as a launcher would."""

    def __init__(self, strategy, index):
        self._strategy, self._index = strategy, index
        self._counted = None

    @property
    def steps(self):
        """Its steps so far."""
        return self._strategy.traffic[self._index]["steps"]

    def kill(self):
        """Kill it, and start its successor."""
        self._counted = self.steps
        process = task("worker", self._index)
        command, environ, folder = process.cmdline(), process.environ(), process.cwd()
        process.kill()
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        # It ends with the chief, as the first one would have.
        _SUCCESSORS.append(subprocess.Popen(command, env=environ, cwd=folder))

    def is_back(self, after):
        """Whether it has taken more than so many steps, those under way, since it was killed."""
        return self._counted is not None and self.steps > self._counted + after


_SUCCESSORS = []
