"""A test of the weights that `fit` leaves, when it ends well."""

from __future__ import annotations

import pytest

from callbacks import evaluation_bodies as bodies


@pytest.mark.worlds(("collective", 2))
def test_two_ranks(pool):
    check(pool.run(bodies.tested))


def test_one_process(alone):
    check(alone.run(bodies.tested))


def check(results):
    for rank, (result, history, screen, expected) in enumerate(results):
        assert result == results[0][0]
        assert result == pytest.approx(expected, rel=1e-6), "weights restored at the end count"
        assert history == {f"test_{name}": [value] for name, value in result.items()}
        lines = [line for line in screen.splitlines() if line.startswith("FinalTest: loss ")]
        assert len(lines) == (rank == 0)
        assert all(", mae " in line for line in lines)


@pytest.mark.worlds(("collective", 2))
def test_no_test_when_training_failed(pool):
    for result, history, screen, _ in pool.run(bodies.tested, True):
        assert result is None
        assert history == {}
        assert screen == ""
