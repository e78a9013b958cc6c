"""Parameter servers: every optimizer takes the steps it takes in one process, or is refused."""

from __future__ import annotations

import numpy as np
import pytest

from dtk.parameter_server.consistency_models import BoundedDelay

from once import once
from strategies import served_optimizers
from strategies.bodies import flat

TOLERANCE = 1e-5

pytestmark = pytest.mark.worlds(("served", 2))


@pytest.mark.parametrize("consistency, parts", [("sync", 2), (BoundedDelay(0), 1)], ids=str)
def test_every_optimizer_trains_tables_as_one_process_does(pool, consistency, parts):
    """Rows pushed for a table had a shape and a rank that Keras's sparse arithmetic cannot use.

    RMSprop, Ftrl, Adadelta, Nadam, Lion, Adafactor and Adagrad failed on that, a MultiOptimizer
    because its members were not known; a norm to clip to was compared with that of each part.
    """
    (mine,) = pool.run(served_optimizers.trained, consistency, parts, timeout=300)
    check(mine, once(served_optimizers.plain))


@pytest.mark.worlds(("served", 1))
def test_asynchronous_steps_of_one_worker_are_those_of_one_process(pool):
    """But for the age of the weights they read, on which these gradients do not depend."""
    (mine,) = pool.run(served_optimizers.of_any_age, "async", timeout=120)
    check(mine, once(served_optimizers.of_any_age, None))


def check(mine, expected):
    wrong = {}
    for name, weights in mine.items():
        wanted = flat(expected[name])
        apart = np.linalg.norm(flat(weights) - wanted) / np.linalg.norm(wanted)
        if not apart <= TOLERANCE:
            wrong[name] = apart
    assert mine and not wrong


@pytest.mark.parametrize("name", served_optimizers.WHOLE)
def test_what_needs_a_whole_table_is_refused_for_parts(pool, name):
    """LARS, Lamb and Adafactor once took each part for a variable: 1e-3 off one process."""
    ((raised, text),) = pool.run(served_optimizers.refused, name)
    assert raised == "ValueError", text
    for part in ("variable_partitioner=", "embeddings' into 2 parts", "optimizer '", "Adagrad"):
        assert part in text


@pytest.mark.parametrize("name", ["non-negative", "unit rows"])
def test_constraints_hold_for_tables_in_parts(pool, name):
    """Parts had none: a table went negative, and nobody was told."""
    (mine,) = pool.run(served_optimizers.constrained, name, "sync")
    np.testing.assert_allclose(mine, served_optimizers.constrained(name, None), atol=1e-6)


def test_a_constraint_over_rows_is_refused_for_parts(pool):
    ((raised, text),) = pool.run(served_optimizers.refused, "unit columns")
    assert raised == "ValueError", text
    for part in ("UnitNorm", "more than a row at a time", "axis=1"):
        assert part in text
