"""The same batches on every rank, and nobody waits for batches that do not come."""

from __future__ import annotations

import numpy as np
import pytest

from data import bodies
from dtk.data.order import permutation

pytestmark = pytest.mark.parametrize("backend, size", [("collective", 2)])


def test_what_root_reads_everyone_gets_and_all_end_together(world, backend, size):
    first, second = world(backend, size).run(bodies.broadcast_batches, 1)
    assert first == second
    kinds, values = zip(*first, strict=True)
    assert kinds == (("EagerTensor", "ndarray"),) * 3
    assert values == ([[0, 1], [0.0, 0.5]], [[2, 3], [1.0, 1.5]], [[4], [2.0]])


@pytest.mark.parametrize(
    "how, kind, message",
    [
        ("raises", "OSError", "shard 2 is broken"),
        ("cannot be sent", "AttributeError", "pickle"),
        ("is nothing", "TypeError", "'NoneType' object is not iterable"),
    ],
)
def test_what_breaks_on_root_breaks_on_all(world, backend, size, how, kind, message):
    """Breaks as a rank that waits for a batch for ever."""
    root, other = world(backend, size).run(bodies.broken_batches, how)
    assert root[:2] == other[:2] == (1 if how == "raises" else 0, kind)
    assert message in root[2] and message in other[2]
    assert root[3] == [] and other[3] == ["rank 1: this happened on rank 0"]


def test_an_error_that_cannot_be_pickled_still_says_what_it_is(world, backend, size):
    root, other = world(backend, size).run(bodies.broken_batches, "raises its own")
    assert root[1:3] == ("Peculiar", "3 of 4")
    assert other[1:3] == ("RuntimeError", "Peculiar: 3 of 4")


def test_every_rank_draws_the_same_order(world, backend, size):
    given, drawn = zip(*world(backend, size).run(bodies.synchronized), strict=True)
    assert list(given) == [permutation(8, 1).tolist()] * 2
    assert drawn[0] == drawn[1] != list(range(8))
    assert np.sort(drawn[0]).tolist() == list(range(8))
