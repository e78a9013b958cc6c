"""Trials that all ranks run together: the same as in one process, and no rank left waiting."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import re
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import keras
import numpy as np
import optuna
import pytest

import dtk
from dtk.cluster import process_owner
from dtk.errors import DisagreementError
from dtk.search import study as studies
from dtk.version import pip_install

from search.bodies import (
    OBJECTIVES,
    Missing,
    eager_fit,
    failures,
    new_study,
    plain_study,
    quiet,
    strategy,
    summary,
)

two_ranks = pytest.mark.worlds(("collective", 2))
two_ranks_each = pytest.mark.worlds(("collective", 2), ("horovod-mpi", 2))
PRUNER = {"n_startup_trials": 4, "n_warmup_steps": 0}


def twelve_trials(kind):
    """Over the world, and then on rank 0 by Optuna alone."""
    here, objective = strategy(), OBJECTIVES[kind]
    pruner = optuna.pruners.MedianPruner(**PRUNER)
    with quiet():
        study = new_study(pruner=pruner) if here.is_chief else None
        found = dtk.search.optimize(study, objective(here), 12, strategy=here)
        plain = None
        if here.is_chief:
            assert found is study
            plain = summary(plain_study(objective(None), 12, pruner=pruner))
    return summary(found), found.best_params, found.best_trial.number, plain


@pytest.mark.full_but("collective-2-by hand", why="tests/communicators holds all wires to the same")
@two_ranks_each
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_twelve_trials_equal_those_of_one_process(pool, kind):
    results = pool.run(twelve_trials, kind, timeout=200)
    (trials, best, number, plain), (others, *best_elsewhere, _) = results
    assert trials == others and [best, number] == best_elsewhere, "every rank knows the results"
    assert [t[:2] for t in trials] == [t[:2] for t in plain], "states and parameters"
    assert {t[0] for t in trials} == {"COMPLETE", "PRUNED"}, "the pruner must have had its say"
    for mine, alone in zip(trials, plain, strict=True):
        assert mine[2] == pytest.approx(alone[2], rel=1e-5)
        assert mine[3].keys() == alone[3].keys()
        assert list(mine[3].values()) == pytest.approx(list(alone[3].values()), rel=1e-5)
        assert mine[4] == alone[4], "what set_user_attr has kept"
    complete = [t for t in plain if t[0] == "COMPLETE"]
    assert best == min(complete, key=lambda t: t[2])[1]


class Raising(keras.callbacks.Callback):
    """Raises in one of its methods."""

    def __init__(self, method, error):
        super().__init__()

        def fail(*args, **kwargs):
            raise error

        setattr(self, method, fail)


class Unsendable(Exception):
    """Its constructor takes what it does not keep."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def local_error():
    class Local(Missing):
        """Known to this process alone."""

    return Local("of a function")


RAISED = {
    "at once": (1, lambda: Missing("a file"), None),
    "on rank 0": (0, lambda: Missing("a file"), None),
    "unsendable": (1, lambda: Unsendable(1, 2), None),
    "local class": (1, lambda: local_error(), None),
    "of TensorFlow": (1, lambda: _of_tensorflow(), None),
    "pruned by one": (1, lambda: optuna.TrialPruned("enough"), None),
    "instead of fit": (1, lambda: Missing("a file"), "fit"),
    "before training": (1, lambda: Missing("a file"), "set_model"),
    "epoch begins": (0, lambda: Missing("a file"), "on_epoch_begin"),
    "epoch ends": (1, lambda: Missing("a file"), "on_epoch_end"),
    "at the end": (1, lambda: Missing("a file"), "end"),
}


def _of_tensorflow():
    import tensorflow as tf

    try:
        tf.zeros([2, 3]) @ tf.zeros([2, 3])
    except tf.errors.InvalidArgumentError as error:
        return error


def each_raises_once(names):
    """Trial i meets what the i-th name says, on one rank; one more trial is well."""
    here = strategy()

    def objective(trial):
        if trial.number == len(names):
            return 0.0
        rank, make, method = RAISED[names[trial.number]]
        if method is None and here.rank == rank:
            raise make()
        # The other rank finds out here ...
        trial.suggest_float("rate", 0.1, 0.2)
        if method == "fit" and here.rank == rank:
            raise make()
        if method == "end":  # ... or when its objective is over ...
            if here.rank == rank:
                raise make()
            return 1.0
        if method is not None:  # ... or in there
            raising = method != "fit" and here.rank == rank
            callbacks = [Raising(method, make())] if raising else []
            eager_fit(None, here, callbacks, epochs=1)
        raise AssertionError("no exception reached this rank")

    catch = (Missing, Unsendable, _of_tensorflow().__class__)
    with quiet():
        study = dtk.search.optimize(
            new_study(), objective, len(names) + 1, strategy=here, catch=catch, patience=20
        )
    return failures(study), here.communicator.next_number()


@pytest.mark.full("a cheaper test holds its rule")
@two_ranks
def test_an_exception_of_one_rank_ends_the_trial_on_all(pool):
    names = list(RAISED)
    (found, number), (elsewhere, other_number) = pool.run(each_raises_once, names)
    assert found == elsewhere
    assert found[-1] == ("COMPLETE", None)
    assert number == other_number, "collectives of later trials must have equal names"
    for name, (state, reason) in zip(names, found, strict=False):
        if name == "pruned by one":
            assert (state, reason) == ("PRUNED", None)
            continue
        assert state == "FAIL"
        assert reason.startswith(f"rank {RAISED[name][0]}: "), name
    reasons = {name: reason for name, (_, reason) in zip(names, found, strict=False)}
    assert "Missing: a file" in reasons["epoch ends"]
    assert "1 and 2" in reasons["unsendable"]
    assert "Matrix size-incompatible" in reasons["of TensorFlow"]


def raises_uncaught(kind):
    """Class, text and notes of what `optimize` raises; and the study's states, on rank 0."""
    here = strategy()
    study = new_study()

    def objective(trial):
        raised = {
            ("objective", 1): Missing("a file"),
            ("unsendable", 1): Unsendable(1, 2),
            ("two", 0): optuna.TrialPruned(),
            ("two", 1): Missing("a file"),
        }
        if (kind, here.rank) in raised:
            raise raised[kind, here.rank]
        swallowed = DisagreementError if kind == "swallowed" else ()
        with contextlib.suppress(swallowed):
            if kind in ("order", "swallowed") or (kind, here.rank) == ("early", 0):
                trial.suggest_float("rate" if here.rank == 0 else "width", 1, 2)
        return 1.0

    def callback(study, trial):
        if kind == "callback":
            raise Missing("a table")

    try:
        with quiet():
            dtk.search.optimize(
                study if kind != "no study" else None,
                objective,
                2,
                strategy=here,
                callbacks=[callback],
                # What is not caught there must not be caught here, in whatever it is wrapped.
                catch=RuntimeError if kind == "unsendable" else (),
            )
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return type(error).__name__, str(error), notes, [t.state.name for t in study.trials]
    return "nothing"


@two_ranks
@pytest.mark.parametrize(
    ("kind", "name", "text", "states"),
    [
        ("objective", "Missing", "a file", ["FAIL"]),
        ("two", "Missing", "a file", ["FAIL"]),
        ("callback", "Missing", "a table", ["COMPLETE"]),
        ("order", "DisagreementError", "rank 0 is at suggest_float('rate'", ["FAIL"]),
        ("early", "DisagreementError", "rank 1 at the end of the objective", ["FAIL"]),
        ("swallowed", "DisagreementError", "rank 1 at suggest_float('width'", ["FAIL"]),
        ("no study", "ValueError", "rank 0 owns the study", []),
        ("unsendable", "Unsendable", "1 and 2", ["FAIL"]),
    ],
)
def test_what_is_not_caught_is_raised_on_all_ranks(pool, kind, name, text, states):
    results = pool.run(raises_uncaught, kind)
    first = "RankError" if kind == "unsendable" else name  # as what it says
    assert [result[0] for result in results] == [first, name]
    assert all(text in result[1] for result in results)
    assert results[0][3] == states
    if kind == "objective":
        assert "Raised on rank 1" in results[0][2], "the other rank's traceback is told"
        assert "in objective" in results[0][2] and "Missing: a file" in results[0][2]
    if kind == "two":
        assert "Rank 0 failed, too" in results[0][2] + results[1][2]


def looks_around():
    """What ranks see of a trial; what only one rank asks; what rank 0 refuses."""
    here = strategy()
    seen = []

    def objective(trial):
        assert isinstance(trial, optuna.trial.BaseTrial)
        x = trial.suggest_float("x", 0, 1, step=0.25)
        kind = trial.suggest_categorical("kind", ["a", None, 3])
        if here.rank == 1:  # no rank waits for what is known on all
            assert trial.params == {"x": x, "kind": kind}
            assert trial.user_attrs["from"] == "outside" and trial.distributions
        if here.rank == 0:
            trial.report(0.5, step=0)
            trial.set_user_attr("only here", 1)
            assert trial.study is study
        try:
            trial.suggest_categorical("kind", ["b"])  # other choices, which Optuna refuses
        except ValueError as error:
            seen.append(type(error).__name__)
        seen.append((trial.number, x, kind, trial.datetime_start is not None, random.random()))
        seen.append((float(keras.random.normal([])), np.random.rand()))
        return 1.0 if here.rank == 0 else None

    study = new_study() if here.is_chief else None
    if here.is_chief:
        study.enqueue_trial({"x": 0.75}, user_attrs={"from": "outside"})
        study.enqueue_trial({}, user_attrs={"from": "outside"})
    if here.rank == 1:
        random.random()  # ranks need not be at the same place in it
    with quiet():
        found = dtk.search.optimize(study, objective, 2, strategy=here, seed=6)
    return seen, [t.user_attrs.get("dtk", {}).get("seed") for t in found.trials]


@two_ranks
def test_a_trial_is_the_same_on_all_ranks(pool):
    (seen, seeds), (elsewhere, seeds_elsewhere) = pool.run(looks_around)
    assert seen == elsewhere
    assert seen[0] == "ValueError" and seen[1][:2] == (0, 0.75)
    assert seen[1][-1] != seen[4][-1], "the seed of a trial is its own"
    assert seeds == seeds_elsewhere == [6, 7]


def returns_its_rank(values):
    here = strategy()
    with quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        study = dtk.search.optimize(new_study(), lambda trial: values[here.rank], 1, strategy=here)
    return failures(study)[0][0], [str(w.message) for w in caught if "rank" in str(w.message)]


@two_ranks
def test_rank_0_decides_what_a_trial_is_worth(pool):
    (state, said), (_, elsewhere) = pool.run(returns_its_rank, [1.0, 2.0])
    assert state == "COMPLETE" and not elsewhere
    assert len(said) == 1 and "returned 1.0 here and 2.0 on rank 1" in said[0]
    assert pool.run(returns_its_rank, [1.0, None])[0] == ("COMPLETE", [])
    assert pool.run(returns_its_rank, [np.nan, np.nan])[0] == ("FAIL", [])
    for nothing in (None, "much"):
        assert pool.run(returns_its_rank, [nothing, nothing])[0] == ("FAIL", [])


# One process: what counts.


@pytest.fixture
def alone():
    with quiet():
        yield dtk.strategies.AllReduceStrategy("local")


def quick(trial):
    value = trial.suggest_float("x", 0, 1)
    if trial.number == 1:
        raise Missing
    return value


@pytest.fixture
def journal(tmp_path):
    def make():
        backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.journal"))
        storage = optuna.storages.JournalStorage(backend)
        return new_study(storage=storage, study_name="study", load_if_exists=True)

    return make


def test_a_study_is_resumed_up_to_its_trials_in_all(alone, journal, capsys):
    def run(n_trials):
        study = journal()
        dtk.search.optimize(study, quick, n_trials, strategy=alone, catch=Missing)
        return failures(study)

    assert [state for state, _ in run(3)] == ["COMPLETE", "FAIL", "COMPLETE"]
    left = journal().ask()  # by a process that was killed
    gone = {**process_owner.this_process(), "since": 0.0}
    left.set_user_attr(studies.ATTRIBUTE, {"owner": gone})
    running = journal().ask()  # by one that lives
    running.set_user_attr(studies.ATTRIBUTE, {"owner": process_owner.this_process()})
    found = run(6)
    states = [state for state, _ in found]
    expected = ["COMPLETE", "FAIL", "COMPLETE", "FAIL", "RUNNING", "COMPLETE", "COMPLETE"]
    assert states == expected, "one more in the place of the trial that was left"
    assert "trials [3] were left by a job that has ended" in capsys.readouterr().out
    assert run(6) == found, "nothing is left to do"


def told_of(study, alone, n_trials):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dtk.search.optimize(study, lambda trial: 1.0, n_trials, strategy=alone)
    texts = [str(one.message) for one in caught if "count until" in str(one.message)]
    return [text.partition(" or were")[0].removesuffix(",") for text in texts]


def test_where_trials_may_be_running_is_told(alone, journal, monkeypatch):
    """One that a job of this host had begun, and not yet noted, was said to be on another."""
    study = journal()
    for host in ("far boot pid", f"{socket.gethostname()} other pid"):
        study.ask().set_user_attr(
            studies.ATTRIBUTE, {"owner": {**process_owner.this_process(), "host": host}}
        )
    study.ask()
    here = "on this host, but in another container or before it was last started"
    places = [
        "trials [0] of study 'study' are running on another host, far",
        f"trials [1] of study 'study' are running {here}",
    ]
    assert told_of(study, alone, 4) == places
    assert [state for state, _ in failures(study)] == ["RUNNING"] * 3 + ["COMPLETE"]
    monkeypatch.setattr(studies, "_TO_NOTE", datetime.timedelta(0))
    unknown = "trials [2] of study 'study' are running without dtk, in a process that is not known"
    assert told_of(study, alone, 4) == [*places, unknown]


def test_a_job_that_comes_too_late_ends(alone, journal, monkeypatch):
    """Another takes the last trial after this one has looked, and before it asks for its own."""
    study, ask = journal(), optuna.Study.ask

    def late(self, *args, **kwargs):
        if len(self.get_trials(deepcopy=False)) == 1:
            ask(journal()).set_user_attr(studies.ATTRIBUTE, {"owner": process_owner.this_process()})
        return ask(self, *args, **kwargs)

    monkeypatch.setattr(optuna.Study, "ask", late)
    dtk.search.optimize(study, lambda trial: 1.0, 2, strategy=alone)
    *counted, given_back = failures(study)
    assert counted == [("COMPLETE", None), ("RUNNING", None)]
    assert given_back == ("FAIL", "another job runs the last of 2 trials")
    assert studies.counted(study) == 2


def test_a_failing_storage_is_not_caught(alone, monkeypatch):
    """Breaks as a study without end, of trials that fail at once and do not count."""
    study = new_study()

    def full(self, *args):
        raise OSError("the disk is full")

    monkeypatch.setattr(optuna.Trial, "set_user_attr", full)
    with pytest.raises(OSError, match="the disk is full"):
        dtk.search.optimize(study, quick, 3, strategy=alone, catch=Exception)
    assert [state for state, _ in failures(study)] == ["FAIL"]


def test_what_cannot_be(alone):
    for wrong in ({"n_trials": -1}, {"patience": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            dtk.search.optimize(new_study(), quick, strategy=alone, **wrong)
    callback = dtk.search.PruningCallback(new_study().ask(), "val_loss")
    with pytest.raises(ValueError, match="the logs of epoch 1 have loss; give validation_data"):
        callback.on_epoch_end(0, {"loss": 1.0})


def test_without_optuna_the_way_to_it_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(pip_install("search"))):
        dtk.search.optimize  # noqa: B018


# A rank that fails in the middle of a step: the job ends, and the next one goes on.

ROOT = Path(__file__).resolve().parents[2]
# Rank 1 never comes to the end of a step of the second trial, for which rank 0 waits.
SCRIPT = """
import sys
from pathlib import Path

import keras
import numpy as np
import optuna

import dtk

folder = sys.argv[1]
strategy = dtk.strategies.AllReduceStrategy("collective")
backend = optuna.storages.journal.JournalFileBackend(f"{folder}/study.journal")
study = optuna.create_study(
    study_name="study", storage=optuna.storages.JournalStorage(backend), load_if_exists=True
)

def step(batch, logs=None):
    if strategy.rank == 0 or batch == 0:
        return
    Path(folder, "dying").touch()
    raise ValueError("no such batch")

def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    if trial.number == 1:
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", run_eagerly=True)
        stop = keras.callbacks.LambdaCallback(on_train_batch_begin=step)
        ones = np.ones((6, 2), "float32")
        model.fit(ones, ones[:, :1], batch_size=2, verbose=0, callbacks=[stop])
    return x

dtk.search.optimize(study, objective, 3, strategy=strategy, catch=ValueError, patience=2)
"""


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.command
def test_the_job_ends_and_the_next_one_makes_up_for_its_trial(alone, journal, tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", "--no-bind"]
        + [str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_NUM_INTRAOP_THREADS": "1"},
    )
    ended = time.time()
    assert done.returncode != 0
    assert ended - (tmp_path / "dying").stat().st_mtime < 30, "seconds from its death to the end"
    assert "the other ranks did not end this trial within 2 s" in done.stderr, done.stderr
    assert "ValueError: no such batch" in done.stderr
    assert failures(journal())[1][0] in ("RUNNING", "FAIL")
    found = dtk.search.optimize(journal(), lambda trial: 1.0, 3, strategy=alone)
    states = [state for state, _ in failures(found)]
    assert states == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"], "three that count"
