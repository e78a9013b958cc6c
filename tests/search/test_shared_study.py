"""Trials side by side: jobs of their own, which share a study by its storage."""

from __future__ import annotations

import subprocess
import sys

import optuna

from search.bodies import failures

# One trial fails. Each job writes which trials it ran.
SCRIPT = """
import pathlib, sys, time
import optuna
import dtk

optuna.logging.set_verbosity(optuna.logging.ERROR)
job, storage = int(sys.argv[1]), sys.argv[2]
storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(storage))
strategy = dtk.strategies.AllReduceStrategy("local")
here = pathlib.Path(f"ran{job}")


def objective(trial):
    with here.open("a") as file:
        print(trial.number, file=file)
    while not all(pathlib.Path(f"ran{one}").exists() for one in range(2)):
        time.sleep(0.01)  # so that both have trials
    x = trial.suggest_float("x", 0, 1)
    if trial.number == 2:
        raise OSError("a file is missing")
    return x


study = optuna.create_study(
    study_name="study",
    storage=storage,
    sampler=optuna.samplers.RandomSampler(seed=job),
    load_if_exists=True,
)
dtk.search.optimize(study, objective, 7, strategy=strategy, catch=OSError)
"""


def test_jobs_share_a_study(tmp_path):
    path = str(tmp_path / "study")
    jobs = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(job), path], cwd=tmp_path)
        for job in range(2)
    ]
    try:
        assert [job.wait(120) for job in jobs] == [0, 0]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    ran = [[*map(int, (tmp_path / f"ran{job}").read_text().split())] for job in range(2)]
    assert sorted(ran[0] + ran[1]) == list(range(7)), "each trial was run once"
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))
    study = optuna.load_study(study_name="study", storage=storage)
    late = "another job runs the last"  # of a trial that is one more than wanted
    states = [state for state, why in failures(study) if not (why or "").startswith(late)]
    assert sorted(states) == ["COMPLETE"] * 6 + ["FAIL"], "one job's failure stops nobody"
    # Jobs that end a trial in the same moment may both begin another, where one is missing.
    assert len(study.trials) - len(states) <= 1
    assert len({trial.params["x"] for trial in study.trials if trial.params}) == 7
