"""An evaluator beside the training: what it writes is what the saved weights give."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import dtk
from dtk.errors import ClusterError
from dtk.parameter_server import evaluator

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

    seen = evaluator.EvaluationLog(tmp_path / "evaluation.csv", None).names
    left = dtk.callbacks.Checkpoint(tmp_path).appeared(seen)
    assert left == [], "a job that is started again would evaluate these again"


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
