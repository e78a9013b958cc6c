"""Synchronized BatchNormalization in all of a model's norms, against each worker's own.

A second line has the same over dtk's `null` communicator, which sends nothing: what is between the
two lines is messages, and waiting in each for the slower worker.
"""

import sys

import dtk
import keras
from dtk.bench.models import Problem
from dtk.bench.variant import Fit
from dtk.communicators.local import NullCommunicator

import report
from fits import take, warm
from models import PROBLEMS

TIME = report.at_most(1.1)


def measure(setting, strategy):
    problem, communicator = PROBLEMS[setting.model], strategy.communicator
    batch = setting.batch_size * strategy.size
    x, y = problem.data((setting.steps + 1) * batch)
    data = {"x": x, "y": y, "batch_size": batch}
    variants = []
    null = NullCommunicator(communicator.rank, communicator.size)
    silent = dtk.strategies.AllReduceStrategy(communicator=null)
    for name, one, scope in (
        ("own", problem, strategy),
        ("synchronized", synchronized(problem), strategy),
        ("nothing sent", synchronized(problem), silent),
    ):
        with scope.scope():
            model = one.compiled(keras)
        variants.append(Fit(name, model, data, setting.steps, communicator))
    norms = sum(map(is_norm, model.layers))
    if not norms:
        sys.exit(f"--model {setting.model} has no BatchNormalization; take resnet20")
    warm(variants)
    seconds = take(variants, setting.rounds, communicator)
    header = "model|synchronized, ms per step|not synchronized, ms per step|"
    header += "synchronized / not|target|"
    what = f"{setting.model}, {norms} norms"
    rows = [
        [what, *report.compared(seconds["synchronized"], seconds["own"], TIME)],
        [f"{what}, nothing sent", *told(seconds["nothing sent"], seconds["own"]), "", ""],
    ]
    return report.markdown(header, rows)


def told(one, other):
    """Cells of a line without a target."""
    return report.compared(one, other, TIME)[:3]


def synchronized(problem):
    """The same problem with norms of the whole global batch."""

    def build(keras):
        return keras.models.clone_model(problem.build(keras), clone_function=synchronize)

    return Problem(build, problem.rows)


def synchronize(layer):
    config = layer.get_config()
    return type(layer).from_config({**config, "synchronized": True} if is_norm(layer) else config)


def is_norm(layer):
    return isinstance(layer, keras.layers.BatchNormalization)
