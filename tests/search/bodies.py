"""What the tests of dtk.search run on every rank: objectives that are quick, and their trials."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import optuna

import dtk
from dtk.strategies import undistributed

from support.bodies import scope_of, strategy

__all__ = ["Missing", "eager_fit", "fitted", "strategy", "summary"]

ROWS = 23


class Missing(Exception):
    """What tests raise."""


@contextlib.contextmanager
def quiet():
    """Optuna tells of every trial; tests do not listen."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)


def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4)).astype("float32")
    return x, (x[:, :1] - x[:, 1:2]).astype("float32")


def eager_fit(trial, trained_under, callbacks=(), rate=0.1, width=3, epochs=2):
    """Two steps an epoch, without tracing them, which takes most of a test; returns the loss."""
    with scope_of(trained_under):
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(width, "tanh"), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse", run_eagerly=True)
    x, y = data()
    pruning = [dtk.search.PruningCallback(trial, "loss")] if trial else []
    history = model.fit(
        x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[*callbacks, *pruning]
    )
    return history.history["loss"][-1]


def fitted(trained_under):
    """An objective written for plain Optuna, but for the scope."""

    def objective(trial):
        rate = trial.suggest_float("rate", 1e-4, 0.3, log=True)
        width = trial.suggest_int("width", 1, 8)
        # A parameter that another decides on.
        if trial.suggest_categorical("slow", [True, False]):
            rate *= trial.suggest_float("factor", 0.1, 1.0)
        keras.utils.set_random_seed(5)
        value = eager_fit(trial, trained_under, rate=rate, width=width)
        trial.set_user_attr("parameters", width)
        return value

    return objective


def descended(trained_under):
    """The same without a model: least squares by gradients summed over the ranks, a few floats."""

    def objective(trial):
        rate = trial.suggest_float("rate", 1e-4, 0.3, log=True)
        steps = trial.suggest_int("steps", 3, 8)
        if trial.suggest_categorical("slow", [True, False]):
            rate *= trial.suggest_float("factor", 0.1, 1.0)
        (x, y), weights = data(), np.zeros((4, 1), "float32")
        rank, size = (trained_under.rank, trained_under.size) if trained_under else (0, 1)
        for step in range(steps):
            mine = slice(rank, None, size)
            error = x[mine] @ weights - y[mine]
            gradient = np.concatenate([x[mine].T @ error, (error**2).sum(keepdims=True)[:1]])
            if trained_under:
                gradient = trained_under.communicator.allreduce(gradient).numpy()
            weights -= rate * gradient[:4] / ROWS
            loss = float(gradient[4, 0]) / ROWS
            trial.report(loss, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        trial.set_user_attr("parameters", steps)
        return loss

    return objective


OBJECTIVES = {"by hand": descended, "fit": fitted}


def new_study(**options):
    options = {"sampler": optuna.samplers.TPESampler(seed=4), **options}
    return optuna.create_study(**options)


def summary(study):
    """States, parameters, values and what was reported, by trial."""
    return [
        (t.state.name, t.params, t.value, t.intermediate_values, t.user_attrs.get("parameters"))
        for t in study.trials
    ]


def failures(study):
    return [
        (t.state.name, t.user_attrs.get("dtk", {}).get("failure"))
        for t in study.get_trials(deepcopy=False)
    ]


def plain_study(objective, n_trials, **options):
    """The same by Optuna alone, in this process."""
    study = new_study(**options)
    with undistributed():
        study.optimize(objective, n_trials)
    return study
