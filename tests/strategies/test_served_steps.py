"""Steps that update in their middle: with parameter servers refused, where that would be too late.

Behind parameter servers gradients are applied when the step is over. keras.io's DCGAN, whose
generator learns from the discriminator just updated, trained on with the old one: 4e-4 away from
one process, and nobody was told.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from dtk.exchange import Downpour
from dtk.parameter_server.consistency_models import BoundedDelay

from once import once
from strategies import served_steps

TOLERANCE = 1e-5
SERVED, TOGETHER = (pytest.mark.worlds(world) for world in (("served", 2), ("collective", 2)))


def check(mine, expected):
    assert np.linalg.norm(mine[0] - expected[0]) <= TOLERANCE * np.linalg.norm(expected[0])
    for name, values in expected[1].items():
        np.testing.assert_allclose(mine[1][name], values, rtol=TOLERANCE)


@SERVED
@pytest.mark.parametrize(
    "consistency, exchange",
    [("sync", None), ("async", None), (BoundedDelay(0), None), ("async", Downpour(2))],
    ids=str,
)
def test_adversaries_who_see_each_other_updated_are_refused(pool, consistency, exchange):
    found = pool.run(served_steps.refused, "adversaries", consistency, exchange)
    ((raised, text, _),) = found
    assert raised == "NotDistributedError", text
    for part in ("'discriminator/", "'adam'", "its own update", "AllReduceStrategy", "first apply"):
        assert part in text


@SERVED
@pytest.mark.parametrize("consistency", ["sync", BoundedDelay(0)], ids=str)
def test_adversaries_whose_gradients_all_come_first_equal_one_process(pool, consistency):
    (mine,) = pool.run(served_steps.served, consistency, True)
    check(mine, once(served_steps.adversaries, None, True))


@TOGETHER
@pytest.mark.parametrize("joint", [False, True])
def test_workers_that_reduce_take_both_kinds_of_adversaries(pool, joint):
    expected = once(served_steps.adversaries, None, joint)
    for mine in pool.run(served_steps.everywhere, joint):
        check(mine, expected)


@SERVED
@pytest.mark.parametrize("name", ["disjoint", "persistent", "rate", "without names"])
def test_steps_that_need_no_update_of_their_own(pool, name):
    (mine,) = pool.run(served_steps.stepped_served, name)
    expected = served_steps.stepped(None, name)
    assert np.linalg.norm(mine - expected) <= TOLERANCE * np.linalg.norm(expected)


@SERVED
@pytest.mark.parametrize(
    "name, parts",
    [
        ("kernel", ["reads 'stepping/dense/kernel' (and 1 more)", "'sgd"]),
        ("table", ["reads 'stepping/embedding/embeddings'"]),
        ("whole table", ["reads 'stepping/embedding/embeddings'"]),
        ("kernel in a function", ["reads 'stepping/dense/kernel'"]),
        ("twice", ["(and 3 more)", "its own update"]),
        ("clipping", ["reads 'stepping/dense/kernel'"]),
        ("branch", ["inside a branch, a loop or a function", "in train_step itself"]),
        ("compiled", ["inside a branch, a loop or a function", "without @tf.function"]),
        ("stranger", ["/kernel' to optimizer", "no trainable weight of the model"]),
        ("by hand", ["assigns 'stepping/dense/bias'", "only optimizers", "constraint"]),
    ],
)
def test_steps_that_need_what_they_have_updated(pool, name, parts):
    ((raised, text, _),) = pool.run(served_steps.refused, name)
    assert raised == "NotDistributedError", text
    for part in (*parts, "model 'stepping'"):
        assert part in text


def test_the_job_of_a_refused_step_ends(tmp_path):
    """The chief raises it from `fit`; workers and servers, who have done nothing, end with it."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import dtk, keras, numpy as np

            strategy = dtk.strategies.ParameterServerStrategy("sync")

            class Twice(keras.Sequential):
                def train_step(self, data):
                    super().train_step(data)
                    return super().train_step(data)

            with strategy.scope():
                model = Twice([keras.Input((2,)), keras.layers.Dense(1)])
                model.compile("rmsprop", "mse")
            x = np.ones((8, 2), "float32")
            try:
                model.fit(x, x[:, :1], batch_size=4, verbose=0)
            finally:
                print("steps:", int(model.optimizer.iterations.numpy()))
            """
        )
    )
    found = subprocess.run(
        [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", "--ps", "1", str(script)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=90,
    )
    told = found.stdout + found.stderr
    assert found.returncode == 1, told
    assert "NotDistributedError: the train_step of model" in told and "steps: 0" in told
    assert "the chief failed; ending the job" in told
