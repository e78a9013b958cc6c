"""Every rank saves to one path, rank 0 alone saves, every rank saves and loads at once."""

from __future__ import annotations

import numpy as np
import pytest

from strategies import saved

TWO = pytest.mark.parametrize("backend, size", [("collective", 2)])


@TWO
def test_every_rank_may_save_to_one_path_and_load_at_once(world, backend, size, tmp_path):
    """Breaks as BadZipFile, or as variables of another shape in an export."""
    names = ["exported", "model.h5", "model.keras", "model.weights.h5"]
    assert world(backend, size).run(saved.every_rank, str(tmp_path)) == [names] * 2


@TWO
def test_rank_0_may_save_alone(world, backend, size, tmp_path):
    """Breaks as a rank that waits for others to read a metric."""
    names = world(backend, size).run(saved.rank_0_alone, str(tmp_path))[0]
    assert names == ["exported", "model.json", "model.keras", "model.weights.h5"]


@TWO
def test_a_later_export_replaces_an_earlier_one(world, backend, size, tmp_path):
    for served, predicted in world(backend, size).run(saved.exported_anew, str(tmp_path)):
        np.testing.assert_allclose(served, predicted, 1e-5, 1e-6)


@TWO
def test_a_second_strategy_in_one_process(world, backend, size):
    """Breaks as collectives of two strategies that have one name."""
    first, second = world(backend, size).run(saved.two_strategies)
    for mine, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(mine, other)


@TWO
def test_models_that_are_not_compiled_predict_every_row(world, backend, size, tmp_path):
    for predictions in world(backend, size).run(saved.uncompiled, str(tmp_path)):
        *distributed, wanted = predictions
        for predicted in distributed:
            np.testing.assert_allclose(predicted, wanted, 1e-5, 1e-6)
