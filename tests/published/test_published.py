"""Scripts after published ones end with two processes as with one, or say before that they cannot.

README.md in this folder says where each is from.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtk import errors

from published import runner
from support.once import once
from support.world import TESTS

ROOT = TESTS.parent
RELATIVE = 1e-5
TIMEOUT = 100

# What must end as in one process.
RIGHT = (
    "chainermn_mnist",
    "cntk_convnet",
    "custom_training",
    "endpoint_layer",
    "fit_with_kwargs",
    "horovod_keras_mnist",
    "multi_worker_with_keras",
    "parameter_server_embedding",
    "siamese_contrastive",
    "vae",
)
# What may be refused instead, before the first update: its loss is a quotient of a whole batch.
RIGHT_OR_REFUSED = ("masked_loss",)
# The same with parameter servers, where an update made inside a step comes after it.
SERVED = (
    "endpoint_layer",
    "fit_with_kwargs",
    "parameter_server_embedding",
    "siamese_contrastive",
    "vae",
)
SERVED_OR_REFUSED = ("custom_training", "masked_loss")

# References that need a strategy of dtk's, in a world of one.
OF_DTK = ("horovod_keras_mnist",)

pytestmark = [
    pytest.mark.command,
    pytest.mark.full("test_self_test.py and cases.py have in small what these scripts do"),
    pytest.mark.skipif(
        importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed"
    ),
]


def over(names: Any) -> Any:
    """Each script over TensorFlow's collectives, and in `make test-all` over Horovod."""
    everywhere = [("collective", 2, name) for name in names]
    everywhere += [pytest.param("horovod-mpi", 2, n, marks=pytest.mark.full) for n in names]
    return pytest.mark.parametrize("backend, size, name", everywhere)


def served(names: Any) -> Any:
    return pytest.mark.parametrize("backend, size, name", [("served", 2, name) for name in names])


def reference(name: str) -> tuple[runner.Outcome, list[str]]:
    """What one process comes to, and the files it leaves."""
    import keras

    run = runner.run_alone if name in OF_DTK else runner.run_plain
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        outcome = run(name, folder)
        keras.utils.clear_session()
        return outcome, runner.files_in(folder)


def numbers(value: Any, path: str = "") -> dict[str, np.ndarray]:
    """Every array and list of numbers in a result, by its place there."""
    if isinstance(value, dict):
        parts = [(f"{path}/{key}", part) for key, part in value.items()]
    elif isinstance(value, list | tuple) and value and np.ndim(value[0]):
        parts = [(f"{path}[{index}]", part) for index, part in enumerate(value)]
    else:
        return {path: np.asarray(value, "float64")}
    return {key: each for place, part in parts for key, each in numbers(part, place).items()}


def assert_equal(mine: dict, plain: dict) -> None:
    got, wanted = numbers(mine), numbers(plain)
    assert got.keys() == wanted.keys()
    apart = {}
    for place, value in wanted.items():
        assert got[place].shape == value.shape, place
        # Arrays that are all but zero, such as a bias that cancels out, are rounding.
        allowed = RELATIVE * max(np.linalg.norm(value), 0.1)
        if not np.linalg.norm(got[place] - value) <= allowed:
            apart[place] = np.linalg.norm(got[place] - value) / np.linalg.norm(value)
    assert not apart, "relative differences from one process"


def assert_refused(outcome: runner.Outcome, words: str = "") -> None:
    failure = outcome.failure
    assert failure is not None, "it ran, and reported success"
    assert Path(failure.file).is_relative_to(ROOT / "dtk"), f"an accident: {failure}"
    assert failure.kind == "ValueError" or hasattr(errors, failure.kind), f"an accident: {failure}"
    assert words in failure.text
    assert not any(outcome.updates), "refused too late"


@over(RIGHT)
def test_two_processes_end_as_one(world, backend, size, name, tmp_path):
    outcomes = world(backend, size).run(runner.run_here, name, str(tmp_path), timeout=TIMEOUT)
    plain, files = once(reference, name)
    for outcome in outcomes:
        assert_equal(outcome.result, plain.result)
        assert outcome.updates == plain.updates
    assert runner.files_in(str(tmp_path)) == files, "left by workers beside rank 0"


@over(RIGHT_OR_REFUSED)
def test_what_is_not_made_of_rows_is_right_or_refused(world, backend, size, name, tmp_path):
    outcomes = world(backend, size).run(runner.run_here, name, str(tmp_path), True, timeout=TIMEOUT)
    _right_or_refused(name, outcomes)


@served(SERVED)
def test_parameter_servers_end_as_one(world, backend, size, name, tmp_path):
    (outcome,) = world(backend, size).run(runner.run_here, name, str(tmp_path), timeout=TIMEOUT)
    plain, _ = once(reference, name)
    assert_equal(outcome.result, plain.result)
    assert outcome.updates == plain.updates


@served(SERVED_OR_REFUSED)
def test_parameter_servers_are_right_or_refuse(world, backend, size, name, tmp_path):
    outcomes = world(backend, size).run(runner.run_here, name, str(tmp_path), True, timeout=TIMEOUT)
    _right_or_refused(name, outcomes)


@served(["parameter_server_loop"])
def test_a_coordinator_schedules_steps_of_ones_own(world, backend, size, name, tmp_path):
    """Breaks as a loop that cannot be scheduled, or learns nothing.

    Its steps are not dtk's: two of them may count as one, as Keras reads a count before it adds 1.
    """
    arguments = (name, str(tmp_path), False, "async")
    (outcome,) = world(backend, size).run(runner.run_here, *arguments, timeout=TIMEOUT)
    assert outcome.result["accuracies"][-1] > 0.95
    assert outcome.result["loss"] < 0.1
    assert 1 < outcome.result["steps"] <= 4 * 5 + 1


def _right_or_refused(name: str, outcomes: list[runner.Outcome]) -> None:
    if any(outcome.failure for outcome in outcomes):
        for outcome in outcomes:
            assert_refused(outcome)
        return
    plain, _ = once(reference, name)
    for outcome in outcomes:
        assert_equal(outcome.result, plain.result)
