"""Resumed training equals uninterrupted training, and no crash harms what is saved."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

from callbacks import bodies

EXACT = 1e-6
two_ranks = pytest.mark.worlds(("collective", 2))


def check(results):
    """Every rank went on where the checkpoint was, and ended where the whole run ended."""
    for result in results:
        assert result["start"] == result["expected start"]
        assert result["difference"] <= EXACT
        assert result["history"].keys() == result["resumed history"].keys()
        for name, values in result["history"].items():
            np.testing.assert_allclose(result["resumed history"][name], values, rtol=1e-5)
        assert result["history"] == results[0]["history"]
        assert result["resumed history"] == results[0]["resumed history"]


# What others in the list show as well.
LESS = ("delayed", "block momentum")


@two_ranks
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if n in LESS else ()) for n in bodies.CASES]
)
def test_resumed_equals_uninterrupted(pool, tmp_path, name):
    results = pool.run(bodies.resume, name, str(tmp_path), timeout=120)
    check(results)
    assert [r["files"] for r in results[1:]] == [None], "only rank 0 may write"
    assert all(f.startswith("checkpoint-") for f in results[0]["files"])


@pytest.mark.parametrize("kind", ["world", "mirrored"])
@pytest.mark.parametrize("name", ["steps", "scaled"])
def test_resumed_equals_uninterrupted_in_one_process(alone, tmp_path, kind, name):
    check(alone.run(bodies.resume, name, str(tmp_path), kind, timeout=120))


@two_ranks
def test_another_world_size_resumes(pool, alone, tmp_path):
    """Written by two ranks within an accumulation window; one process and two devices go on."""
    pool.run(bodies.train, "steps", str(tmp_path / "0"), True, timeout=120)
    [(whole, _, _)] = alone.run(bodies.train, "steps", timeout=120)
    for kind in ("world", "mirrored"):
        place = str(shutil.copytree(tmp_path / "0", tmp_path / kind))
        [(again, _, start)] = alone.run(bodies.train, "steps", place, False, 9, kind, timeout=120)
        assert start == (1, 2)
        assert bodies.difference(again, whole) <= 1e-5


@two_ranks
def test_another_model_is_refused_on_every_rank(pool, tmp_path):
    for answers in pool.run(bodies.another_model, str(tmp_path)):
        (kind, shape), (other_kind, missing) = answers
        assert kind == other_kind == "ValueError"
        assert re.search(r"dense\w*/kernel \[\[6, 4\].* has .*kernel \[\[6, 5\]", shape)
        assert "resume=False" in shape
        assert "belongs to another model" in missing


@two_ranks
def test_a_corrupt_checkpoint_falls_back_to_the_one_before(pool, tmp_path):
    results = pool.run(bodies.corrupt, str(tmp_path), timeout=90)
    (told, _, _), (told_elsewhere, _, _) = results
    assert len(told) == 1
    assert "checkpoint-00000003: weights.weights.h5 is not what was written" in told[0]
    assert "going back to" in told[0]
    assert "checkpoint-00000002" in told[0]
    assert told_elsewhere == []
    for _, epochs, lost in results:
        assert epochs == 4
        assert lost[0] == "ValueError"
        assert "no checkpoint can be read" in lost[1]
        assert "resume=False" in lost[1]


@two_ranks
def test_when_rank_0_cannot_write_every_rank_raises(pool, tmp_path):
    first, second = pool.run(bodies.full_disk, str(tmp_path / "taken"))
    assert first == second
    assert first[0] in ("FileExistsError", "NotADirectoryError")


@two_ranks
def test_a_run_that_stopped_early_stays_stopped(pool, tmp_path):
    for (epochs, weights), (epochs_again, weights_again) in pool.run(
        bodies.early_stopped, str(tmp_path)
    ):
        assert epochs == epochs_again == [0, 1]
        np.testing.assert_allclose(weights_again, weights, rtol=1e-6)


@two_ranks
def test_python_and_numpy_draw_on_where_they_were(pool, tmp_path):
    """Breaks when their state is saved but not restored: the resumed script has another seed."""
    first, *_ = pool.run(bodies.draws, str(tmp_path))
    whole, resumed = first
    assert sorted(resumed) == sorted(whole)[7:]
    assert resumed == {step: whole[step] for step in resumed}


@two_ranks
@pytest.mark.parametrize("mode, best", [("min", np.argmin), ("max", np.argmax)])
def test_the_best_of_an_earlier_run_stays_the_best(pool, tmp_path, mode, best):
    for notes, losses in pool.run(bodies.best_across_runs, str(tmp_path), mode):
        assert best(losses) < 2, "the case must have its best epoch in the first run"
        assert notes[0] == notes[1]
        assert notes[0]["epoch"] == best(losses) + 1
        assert notes[0]["value"] == pytest.approx(losses[best(losses)])


@two_ranks
def test_a_dropout_or_metric_more_than_was_saved_is_refused(pool, tmp_path):
    """Breaks as "zip() argument 2 is shorter than argument 1"."""
    for (kind, dropout), (other_kind, metric) in pool.run(bodies.one_dropout_more, str(tmp_path)):
        assert kind == other_kind == "ValueError"
        assert "it has 1 random layers (Dropout and the like), this model has 2" in dropout
        assert "resume=False" in dropout
        assert "variables of metrics, this model has" in metric


@two_ranks
def test_in_a_callback_list_of_the_scripts_own(pool, tmp_path):
    assert pool.run(bodies.own_callback_list, str(tmp_path)) == [[[0], [0, 1]]] * 2


@two_ranks
def test_best_and_max_to_keep(pool, tmp_path):
    for best, same, files in pool.run(bodies.best_of, str(tmp_path)):
        assert best < 3, "the case must have a best epoch before the last"
        assert same
        assert files == [
            "best.json",
            "best.weights.h5",
            "checkpoint-00000003",
            "checkpoint-00000004",
        ]


@two_ranks
def test_sigterm_on_one_rank_saves_and_ends_all(pool, tmp_path):
    results = pool.run(bodies.terminated, str(tmp_path), timeout=120)
    assert results[0] == results[1]
    code, restored, (epoch, step, _), difference = results[0]
    assert code == 143
    assert restored, "SIGTERM must be given back"
    assert (1, 0) < (epoch, step) < (3, 0), "left after the signal, before the end"
    assert difference <= EXACT


@two_ranks
@pytest.mark.parametrize("form", ["arrays", "dataset", "stream"])
def test_sigterm_during_validation_saves_what_training_has_reached(pool, tmp_path, form):
    """Breaks as the death of a worker: it used to be deaf until the validation was over."""
    results = pool.run(bodies.preempted_in_validation, str(tmp_path), form, timeout=120)
    check(results)
    assert [result["code"] for result in results] == [143, 143]


def test_sigterm_during_validation_in_one_process(alone, tmp_path):
    results = alone.run(bodies.preempted_in_validation, str(tmp_path), "arrays", timeout=120)
    check(results)
    assert results[0]["code"] == 143


def test_sigterm_in_one_process(alone, tmp_path):
    [(code, restored, (epoch, step, _), difference)] = alone.run(bodies.terminated, str(tmp_path))
    assert (code, restored, epoch, step) == (143, True, 1, 2)
    assert difference <= EXACT


def test_arguments():
    from dtk.callbacks import Checkpoint

    for arguments, message in [
        ({"save_freq": 0}, "'epoch' or a number of steps"),
        ({"save_freq": "batch"}, "got 'batch'"),
        ({"max_to_keep": 0}, "at least 1"),
        ({"monitor": "speed"}, "give mode"),
        ({"monitor": "loss", "mode": "least"}, "'auto', 'min' or 'max'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Checkpoint("somewhere", **arguments)
    assert Checkpoint("x", monitor="val_auc").larger_is_better
    assert not Checkpoint("x", monitor="val_mean_absolute_error").larger_is_better
    assert Checkpoint("x", monitor="speed", mode="max").larger_is_better
