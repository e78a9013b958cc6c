"""An evaluator beside the training: what it writes is what the saved weights give."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

import dtk
from dtk.errors import ClusterError
from dtk.parameter_server import evaluator

pytestmark = pytest.mark.command

DATA = (np.ones((4, 2)), np.ones((4, 1)))
HERE = Path(__file__).resolve().parent
RUN = [sys.executable, "-m", "dtk.cli.main", "run", "-n", "1", "--ps", "1", "--evaluator"]


def run(*arguments):
    return subprocess.run(
        [*RUN, str(HERE / "evaluated.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=150,
    )


def rows_of(directory):
    with open(directory / "evaluation.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.full("a cheaper test holds its rule")
def test_checkpoints_are_evaluated_as_they_appear(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path)
    assert [(row["epoch"], row["step"], row["iterations"]) for row in rows] == [
        ("0", "30", "30"),
        ("1", "20", "60"),
        ("2", "0", "80"),
    ]
    final = [float(word) for word in re.search(r"final (\S+) (\S+)", done.stdout).groups()]
    assert abs(float(rows[-1]["loss"]) - final[0]) <= 1e-5 * final[0]
    assert abs(float(rows[-1]["accuracy"]) - final[1]) <= 1e-6
    assert done.stdout.count("evaluator: checkpoint-") == 3
    assert "val_loss" not in done.stdout, "the chief need not stop to validate"
    assert list((tmp_path / "events" / "evaluation").iterdir())
    assert done.stderr == ""

    names = [row["checkpoint"] for row in rows]
    assert sorted(os.listdir(tmp_path / "export" / "latest")) == names[-2:]
    accuracies = [float(row["accuracy"]) for row in rows]
    records = [i for i in range(3) if accuracies[i] > max(accuracies[:i], default=0)]
    best = [f"{names[i]}.keras" for i in records]
    assert sorted(os.listdir(tmp_path / "export" / "most right")) == best
    again = keras.models.load_model(tmp_path / "export" / "most right" / best[-1])
    images, labels = load_digits(return_X_y=True)
    right = np.mean(again.predict(images[1280:1536], verbose=0).argmax(-1) == labels[1280:1536])
    assert abs(right - accuracies[records[-1]]) <= 1e-6

    seen = evaluator.EvaluationLog(tmp_path / "evaluation.csv", None).names
    left = dtk.callbacks.Checkpoint(tmp_path).appeared(seen)
    assert left == [], "a job that is started again would evaluate these again"


@pytest.mark.full("a killed worker of test_lost_tasks.py comes back the same way")
def test_a_killed_evaluator_comes_back_and_leaves_no_checkpoint_out(tmp_path):
    """Meanwhile, and also where training is over by the time that it is back."""
    done = run(tmp_path, "kill")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "evaluator 0 was killed by SIGKILL; starting it again (2 of 3)" in done.stderr
    assert [row["iterations"] for row in rows_of(tmp_path)] == ["30", "60", "80"]


@pytest.mark.parametrize(
    "callbacks, data, said",
    [
        ([], DATA, "evaluator 0: fit has no dtk.callbacks.Checkpoint"),
        ([dtk.callbacks.Checkpoint("nowhere")], None, "evaluator 0: fit has no validation_data"),
    ],
    ids=["no checkpoint", "no data"],
)
def test_mistakes(callbacks, data, said):
    strategy = dtk.strategies.AllReduceStrategy("local")
    strategy.make_trainer = lambda model: evaluator.EvaluatorTrainer(model, strategy)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ClusterError, match=said):
        model.fit(*DATA, callbacks=callbacks, validation_data=data)


def test_a_log_is_read_again_and_numbers_of_another_model_are_not_mixed_in(tmp_path):
    """A file without a header, since its writer was killed, was never given one."""
    path = tmp_path / "evaluation.csv"
    path.touch()
    saved = evaluator.SavedProgress(1, 0, 8)
    evaluator.EvaluationLog(path, None).write("checkpoint-1", saved, {"loss": 1.0})
    log = evaluator.EvaluationLog(path, None)
    with pytest.raises(ClusterError, match="has the columns .*loss, and this model has .*accuracy"):
        log.write("checkpoint-2", saved, {"accuracy": 1.0})
    assert log.names == {"checkpoint-1"}


class Saves:
    """Stands for the callback that saves checkpoints: they are there from the start."""

    def __init__(self, directory, names):
        self.directory, self.names = directory, names

    def appeared(self, seen):
        return [name for name in self.names if name not in seen]

    def load_weights(self, model, name):
        return evaluator.SavedProgress(int(name[-1]), 0, None)


class LeavesAt:
    """Stands for the chief, which is gone when it is asked again."""

    def __init__(self, asks):
        self.asks = asks

    def is_gone(self):
        self.asks -= 1
        return self.asks < 0


@pytest.mark.parametrize(
    "config, found",
    [({}, ["1", "2", "3"]), ({"throttle": 60}, ["3"]), ({"start_delay": 60}, ["1", "2", "3"])],
)
def test_when_checkpoints_are_evaluated(tmp_path, monkeypatch, config, found):
    waited = []
    monkeypatch.setattr(evaluator.time, "sleep", waited.append)
    log = evaluator.EvaluationLog(tmp_path / "evaluation.csv", None)
    given = []

    def note(model, directory, name, numbers, earlier):
        given.append((directory, name[-1], numbers, len(earlier), len(waited)))

    config = dtk.strategies.EvaluatorConfig(**config, exporters=[note])
    source = Saves(tmp_path, ["c1", "c2", "c3"])
    strategy = types.SimpleNamespace(evaluator=config, chief=LeavesAt(2))
    evaluator.watch_until_end(None, source, lambda: {"loss": 1.0}, log, strategy)
    wait = 2 if config.start_delay else 0  # it is gone before the time has come
    assert given == [(tmp_path, n, {"loss": 1.0}, i, wait) for i, n in enumerate(found)]


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"throttle": "5"}, "throttle='5'; expected seconds"),
        ({"steps": "2"}, "steps='2'; expected batches"),
        ({"throttle": -1}, "throttle=-1; expected seconds"),
        ({"start_delay": float("nan")}, "start_delay=nan; expected seconds"),
        ({"steps": 0}, "steps=0; expected batches"),
    ],
)
def test_settings_that_make_no_sense(wrong, said):
    with pytest.raises(ValueError, match=said):
        dtk.strategies.EvaluatorConfig(**wrong)


def test_a_best_model_needs_a_number_that_is_there(tmp_path):
    with pytest.raises(ValueError, match="mode='least'"):
        dtk.inference.BestExporter(mode="least")
    with pytest.raises(ValueError, match="keep=0"):
        dtk.inference.LatestExporter(keep=0)
    with pytest.raises(ValueError, match=r"monitor='recall'\): an evaluation gives loss"):
        dtk.inference.BestExporter(monitor="recall")(None, tmp_path, "c1", {"loss": 1.0}, [])


@pytest.mark.parametrize("mode, sign", [("min", 1), ("max", -1)])
def test_numbers_that_are_not_finite_are_never_the_best(tmp_path, monkeypatch, mode, sign):
    """After a first evaluation of NaN no model was exported any more."""
    monkeypatch.setattr(dtk.inference.exporters, "export", lambda *args, **kwargs: None)
    exporter = dtk.inference.BestExporter(mode=mode)
    earlier, exported = [], []
    for value in (np.nan, np.inf, -np.inf, 0.5, 0.6, 0.5, np.nan, 0.4):
        numbers = {"loss": sign * value}
        if exporter(None, tmp_path, "checkpoint-1", numbers, earlier) is not None:
            exported.append(value)
        earlier.append(numbers)
    assert exported == [0.5, 0.4]
