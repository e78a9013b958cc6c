"""What it takes before the first batch can be read, and after the last."""

from __future__ import annotations

import pytest

from dtk.strategies import slicing

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


@pytest.mark.parametrize("backend, size", [("local", 1), ("collective", 2)])
def test_no_pipeline_waits_for_its_tuner_when_it_ends(world, backend, size):
    """See `strategies/pipelines.py`: with a tuner an epoch took up to twice its steps."""
    for opened in world(backend, size).run(feeding_bodies.tuned):
        wanted = opened.pop("asked for")
        assert wanted and all(wanted), "a script that asks for tuning gets it"
        assert set(opened) == {"fit", "evaluate", "predict", "shard", "loop"}
        for name, pipelines in opened.items():
            assert pipelines and not any(flag is not False for flag in pipelines), name
