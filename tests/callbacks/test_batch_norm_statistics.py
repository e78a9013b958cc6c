"""Statistics are those of whole batches, over all ranks; nothing else of training changes."""

from __future__ import annotations

import numpy as np
import pytest

from dtk.callbacks import BatchNormStatistics

from callbacks import evaluation_bodies as bodies

two_ranks = pytest.mark.worlds(("collective", 2))


def check(results, rows):
    for (weights, found, losses, logs), plain, x in results:
        (mean, variance), _ = found
        batch = x[:rows].astype("float64")
        np.testing.assert_allclose(mean, batch.mean(0), rtol=1e-6)
        np.testing.assert_allclose(variance, batch.var(0), rtol=1e-5)
        if plain is not None:
            assert weights == plain[0], "training must not notice"
            assert logs == plain[3]
            assert not np.allclose(variance, plain[1][0][1], rtol=0.1), "the case must differ"
        assert losses[0] == pytest.approx(losses[1], rel=1e-6), "validation must see them"
        for one, other in zip(found, results[0][0][1], strict=True):
            np.testing.assert_array_equal(one, other)


@two_ranks
@pytest.mark.parametrize(
    "form, batches, size, rows",
    [
        ("arrays", 2, 15, 30),  # 8 and 7 rows
        ("dataset", 2, 36, 37),  # a last batch of one row, of which one rank has none
    ],
)
def test_two_ranks(pool, form, batches, size, rows):
    check(pool.run(bodies.normalized, form, batches, size, timeout=90), rows)


@two_ranks
def test_synchronized_layers_and_several_steps_per_execution(pool):
    check(pool.run(bodies.normalized_in_executions, timeout=90), 32)


def test_two_devices(alone):
    check(alone.run(bodies.normalized, "arrays", 1, 15, "mirrored", timeout=90), 15)


@two_ranks
def test_a_model_without_is_refused(pool):
    for (kind, none), (other_kind, renorm) in pool.run(bodies.normalization_refused):
        assert kind == other_kind == "ValueError"
        assert "has no BatchNormalization that is trained" in none
        assert "renorm=True" in renorm


def test_arguments():
    with pytest.raises(ValueError, match="batches must be an integer of at least 1, got 0"):
        BatchNormStatistics(np.zeros((2, 2)), batches=0)
