"""What Python blocks of the documentation assume, by name; and files that shell blocks read."""

from __future__ import annotations

from dtk.bench.results import TELLING, BenchResults, Reading, task_of

_DATA = """
import keras
import numpy as np

keras.utils.set_random_seed(7)
x = np.random.rand(256, 4).astype("float32")
y = x.sum(1, keepdims=True)


def build_model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
"""
_COMPILED = f"""{_DATA}
import dtk

strategy = dtk.auto_strategy()
with strategy.scope():
    model = build_model()
    model.compile("adam", "mse")
"""

# Two trials of the many.
_SEARCHED = f"""{_DATA}
import functools
import dtk, optuna

optuna.logging.set_verbosity(optuna.logging.WARNING)
x, y = x[:8], y[:8]
x_val, y_val = x, y


def build_model(width):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(width), keras.layers.Dense(1)])


def two_trials(optimize, study, objective, n_trials, **options):
    return optimize(study, objective, 2, **options)


dtk.search.optimize = functools.partial(two_trials, dtk.search.optimize)
"""

# Each is run before a block, in the same names.
PREAMBLES = {
    "nothing": "",
    "data": _DATA,
    "plain": f"{_DATA}\nimport dtk\n\nmodel = build_model()\n",
    "compiled": _COMPILED,
    "searched": _SEARCHED,
    "grouped": f"{_SEARCHED}\nstrategy = dtk.strategies.AllReduceStrategy('local')\n"
    "objective = lambda trial: trial.suggest_float('x', 0, 1)\n",
    "compiled and rows": f"{_COMPILED}\nrows = x\n",
    "digits": """
import dtk
from sklearn.datasets import load_digits

strategy = dtk.strategies.AllReduceStrategy(communicator)
digits = load_digits()
x = (digits.images.reshape(-1, 64) / 16).astype("float32")[:1000]
y = digits.target[:1000]
""",
}


def benchmark(folder):
    """What `dtk bench --model resnet20 --json bench.json` would leave."""

    def turns(seconds, sent=0.0):
        return [[Reading(seconds, sent, None, 1.0, (seconds,))] * 2]

    setting = {"workers": 2, "batch_size": 32, "communicators": ["collective"]}
    setting["ranks"] = [{"host": "here", "cores": [core]} for core in range(2)]
    sums = {task_of(size): {"collective allreduce": turns(2e-3 + size * 1e-9)} for size in TELLING}
    steps = {"limit": turns(0.1), "collective none": turns(0.106, 1.1e6)}
    saved = BenchResults(setting, {"resnet20": 270_000}, {"resnet20": steps, **sums})
    saved.save(folder / "bench.json")


FILES = {"benchmark": benchmark}

# The line of `dtk doctor` that depends on who starts it, without the seconds of all others.
DOCTOR = """
from dtk.cli import doctor

doctor.show(doctor.environment()[1])
"""

# Stands where the documentation has the user's script.
TRAIN = """
import dtk.cluster

found = dtk.cluster.detect()
print(f"{found.role} {found.rank} of {found.size}", flush=True)
"""

# Stands where `dtk config` has left the user's job.
JOB = "workers = 2\n"
