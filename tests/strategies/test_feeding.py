"""What it takes before the first batch can be read, and after the last."""

from __future__ import annotations

import pytest

from dtk.input import slicing

from strategies import feeding_bodies

two_ranks = pytest.mark.parametrize("backend, size", [("collective", 2)])


@two_ranks
def test_cutting_is_not_converted_by_autograph(world, backend, size):
    """Converting took ten times as long as tracing; converted code is in files of its own."""
    for _, files in world(backend, size).run(feeding_bodies.fit):
        assert files == [slicing.__file__]


@two_ranks
def test_fit_builds_a_pipeline_once(world, backend, size):
    """Keras builds one, which is cut as it is. dtk asked for another, and cut that."""
    for built, _ in world(backend, size).run(feeding_bodies.fit):
        assert built == 1


here = pytest.mark.parametrize("backend, size", [("local", 1), ("collective", 2)])


@here
def test_no_pipeline_waits_for_a_tuner_that_gains_nothing(world, backend, size):
    """See `strategies/pipelines.py`: on one core an epoch took up to twice its steps."""
    for opened in world(backend, size).run(feeding_bodies.tuned):
        for asked in ("asked for", "asked for, on one core"):
            assert all(opened.pop(asked)), "a script that asks for tuning gets it"
        names = ("predict", "dataset", "shard", "loop", "own loop")
        for name in ("fit", *(f"{name}, on one core" for name in names)):
            flags = opened.pop(name)
            assert flags and not any(flag is not False for flag in flags), name
        assert sorted(opened) == sorted(names)
        assert all(flag is None for flags in opened.values() for flag in flags), (
            "with cores to share, what the script leaves to TensorFlow stays there"
        )


@pytest.mark.parametrize("backend, size", [("local", 1)])
def test_a_loop_reads_ahead_on_one_core(world, backend, size):
    """TensorFlow adds that to a pipeline only where it tunes it."""
    for lead in world(backend, size).run(feeding_bodies.lead):
        assert lead[0] == 0 and all(steps > 0 for steps in lead[1:])


@pytest.mark.parametrize("backend, size", [("collective", 2)])
@pytest.mark.parametrize("batches, steps", [(None, 3), (12, 4)])
def test_workers_of_a_py_dataset_are_not_read_ahead(world, backend, size, batches, steps):
    """They stop when an epoch ends; a batch asked for by then was an error in the next epoch."""
    for plain, losses in world(backend, size).run(feeding_bodies.fit_workers, batches, steps):
        assert losses == plain
