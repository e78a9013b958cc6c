"""A world of one has nothing to reduce: `fit` under a strategy, against plain `fit`.

Whole epochs, as a script would see them: with what `fit` does once.
"""

import time

import dtk
import keras
from dtk.bench.turns import order

import report
from models import PROBLEMS

FEW = ("dense", "conv")  # their steps are short, so there are more of them
MORE = 5
SPEED = report.at_least(0.98)


def measure(setting, strategy):
    del strategy
    strategy = dtk.strategies.AllReduceStrategy(communicator="local")
    rows = []
    for name in dict.fromkeys((*FEW, setting.model)):
        steps = setting.steps * (MORE if name in FEW else 1)
        plain, distributed = epochs(PROBLEMS[name], setting, steps, strategy)
        cells = report.compared(distributed, plain, SPEED, report.MS / steps, speed=True)
        rows.append([f"{name}, epochs of {steps} steps", *cells])
    header = "model|`fit` under dtk, ms per step|plain `fit`, ms per step|plain / dtk|target|"
    return report.markdown(header, rows)


def epochs(problem, setting, steps, strategy):
    """Seconds of an epoch by round, of plain `fit` and under the strategy."""
    x, y = problem.data(steps * setting.batch_size)
    plain = problem.compiled(keras)
    with strategy.scope():
        distributed = problem.compiled(keras)
    models = [plain, distributed]
    seconds = {id(model): [] for model in models}
    for number in range(setting.rounds + 1):
        for model in order(models, number):
            began = time.perf_counter()
            model.fit(x, y, batch_size=setting.batch_size, verbose=0)
            if number:  # the first one traces
                seconds[id(model)].append(time.perf_counter() - began)
    return [seconds[id(model)] for model in models]
