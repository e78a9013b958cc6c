"""Trials side by side in groups of workers, which share a study by its storage."""

from __future__ import annotations

import time

import optuna
import pytest

import dtk
from dtk.errors import DtkError

from search.bodies import Missing, failures, fitted, plain_study, quiet, strategy, summary

two_ranks = pytest.mark.worlds(("collective", 2))


def side_by_side(storage, n_trials):
    """Two groups of one worker; trial 2 fails. States, the group of each trial, and where it is."""
    ran = []
    with quiet(), dtk.search.groups(strategy(), workers_per_trial=1) as group:

        def objective(trial):
            ran.append(trial.number)
            time.sleep(0.1)
            trial.set_user_attr("group", group.index)
            x = trial.suggest_float("x", 0, 1)
            if trial.number == 2:
                raise Missing("a file")
            return x

        study = group.study(
            "study", storage, sampler=optuna.samplers.RandomSampler(seed=group.index)
        )
        dtk.search.optimize(study, objective, n_trials, strategy=group.strategy, catch=Missing)
        group.wait()
        counted = [
            (t.state.name, t.params["x"], t.user_attrs["group"])
            for t in study.trials
            if "ended" in t.user_attrs["dtk"]
        ]
        return group.index, group.count, group.strategy.size, ran, counted


def check_side_by_side(results, n_trials):
    assert [result[:3] for result in results] == [(0, 2, 1), (1, 2, 1)]
    (*_, first, trials), (*_, second, seen_by_second) = results
    assert trials == seen_by_second and len(trials) == n_trials
    assert sorted(first + second) == list(range(n_trials)), "each trial was run once"
    assert first and second and {t[2] for t in trials} == {0, 1}
    assert [t[0] for t in trials].count("FAIL") == 1, "one group's failure stops nobody"
    assert len({t[1] for t in trials}) == n_trials


@two_ranks
def test_groups_share_a_journal(pool, tmp_path):
    file = tmp_path / "of both" / "study.journal"
    check_side_by_side(pool.run(side_by_side, str(file), 7), 7)
    assert file.exists()


def left_at():
    """When this rank comes to the end of `with`, and when it is through."""
    with dtk.search.groups(strategy()) as group:
        if group.index == 1:
            time.sleep(1.0)
        reached = time.monotonic()
    return reached, time.monotonic()


@pytest.mark.worlds(("collective", 2), ("mpi-wheel", 2))
def test_no_group_goes_on_before_all_have_ended(pool):
    """Over MPI rank 0 sent its seed and went on, with the best of unfinished trials."""
    (_, first), (second, _) = pool.run(left_at)
    assert first >= second


def one_group_of_all():
    """A group whose communicator is a part of the world's: here, all of it. And Optuna alone."""
    with quiet(), dtk.search.groups(strategy().communicator, workers_per_trial=2) as group:
        sampler = optuna.samplers.TPESampler(seed=4)
        study = group.study("study", optuna.storages.InMemoryStorage(), sampler=sampler)
        found = dtk.search.optimize(study, fitted(group.strategy), 2, strategy=group.strategy)
        plain = summary(plain_study(fitted(None), 2)) if study is not None else None
    return group.strategy.size, summary(found), plain


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("collective", 2), ("horovod-mpi", 2))
def test_a_group_trains_together(pool):
    (size, trials, plain), (_, elsewhere, nothing) = pool.run(one_group_of_all)
    assert size == 2 and trials == elsewhere and nothing is None
    assert [t[:2] for t in trials] == [t[:2] for t in plain]
    assert [t[2] for t in trials] == pytest.approx([t[2] for t in plain], rel=1e-5)


def of_all_workers():
    """Trials whose model is compiled in the scope of the strategy that the groups are made of."""
    with quiet(), dtk.search.groups(strategy(), workers_per_trial=1) as group:
        study = group.study("study", optuna.storages.InMemoryStorage())
        try:
            dtk.search.optimize(study, fitted(strategy()), 2, strategy=group.strategy)
        except ValueError as error:
            return str(error)


@two_ranks
def test_a_trial_of_a_group_refuses_a_model_of_all_workers(pool):
    """It said that ranks disagree on a variable, whose width each group had drawn for itself."""
    for rank, said in enumerate(pool.run(of_all_workers)):
        assert said.startswith(f"rank {rank}: fit begins") and "group.strategy.scope()" in said


def without_storage():
    group = dtk.search.groups(strategy())
    try:
        group.study("study", "sqlite:////nowhere/study.db")
    except Exception as error:
        return type(error).__name__, isinstance(error, DtkError)


@two_ranks
def test_a_storage_that_does_not_answer_is_told_to_all(pool):
    assert [name for name, _ in pool.run(without_storage)] in (
        ["OperationalError"] * 2,
        ["OperationalError", "RankError"],
    )


def test_groups_need_workers_they_can_share():
    here = dtk.strategies.AllReduceStrategy("local")
    with pytest.raises(ValueError, match="workers_per_trial=2 does not divide 1 workers"):
        dtk.search.groups(here, 2)
    with pytest.raises(TypeError, match="groups over str"):
        dtk.search.groups("collective")


@pytest.mark.full("a cheaper test holds its rule")
@two_ranks
def test_groups_share_a_database(pool, tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    check_side_by_side(pool.run(side_by_side, url, 7, timeout=120), 7)
    storage = optuna.storages.RDBStorage(url)
    study = optuna.load_study(study_name="study", storage=storage)
    late = "another group runs the last"  # of a trial that is one more than wanted
    states = [state for state, why in failures(study) if not (why or "").startswith(late)]
    assert sorted(states) == ["COMPLETE"] * 6 + ["FAIL"]
    # Groups that end a trial in the same moment may both begin another, where one is missing.
    assert len(study.trials) - len(states) <= 1, "one of two groups is late at most once"
    storage.engine.dispose()
