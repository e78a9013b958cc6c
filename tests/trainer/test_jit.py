"""`jit_compile=True`: N workers, each compiled by XLA, equal one process compiled by XLA.

Tolerance: relative difference of all weights <= 1e-5 in float32, and every logged number within
1e-5 of the one process's; with 16 bits, 1e-2. Uncompiled, weights are within 1e-4.
"""

from __future__ import annotations

import numpy as np
import pytest

from support.once import once
from trainer import compiled_bodies

pytestmark = pytest.mark.not_on_pretended_gpus("XLA does not run there")
TOLERANCE = 1e-5


def check(results, plain, tolerance=TOLERANCE):
    for result in results:
        assert result.keys() == plain.keys()
        difference = np.linalg.norm(result["weights"] - plain["weights"])
        assert difference <= tolerance * np.linalg.norm(plain["weights"])
        for name in plain.keys() - {"weights"}:
            np.testing.assert_allclose(result[name], plain[name], tolerance, tolerance, name)


@pytest.mark.worlds(("collective", 2))
def test_two_ranks_equal_one_process(pool):
    """Convolution, batch normalization, sample weights, clipping, a regularisation loss."""
    plain = compiled_bodies.fit
    results = pool.run(compiled_bodies.fit, "here", meanwhile=lambda: once(plain))
    check(results, once(plain))


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("collective", 2))
def test_two_ranks_with_fused_operations_equal_plain_keras_without(pool):
    """Tolerance as above; one rank that normalizes otherwise is named."""
    fit = compiled_bodies.fused_fit
    results = pool.run(fit, "here", meanwhile=lambda: once(fit))
    plain, fused = once(fit)
    assert fused == (False, False)
    assert [fused for _, fused in results] == [(True, True)] * 2
    check([found for found, _ in results], plain)
    for said in pool.run(compiled_bodies.other_norms_on_rank_1):
        assert "variable DTK_FUSED_BATCH_NORM" in said


@pytest.mark.parametrize(
    "backend, size",
    [
        pytest.param("collective", 2, marks=pytest.mark.full),
        pytest.param("mirrored", 2, marks=pytest.mark.full),
        ("local", 1),
    ],
)
def test_near_to_the_uncompiled_one(world, backend, size):
    devices = size if backend == "mirrored" else 0
    here = world("local", 1) if backend == "mirrored" else world(backend, size)
    uncompiled = once(compiled_bodies.fit, None, 0, False)
    check(here.run(compiled_bodies.fit, "here", devices), uncompiled, 1e-4)


@pytest.mark.full
@pytest.mark.worlds(("collective", 2))
def test_sixteen_bits_and_a_loss_scale(pool):
    plain = once(compiled_bodies.mixed)
    results = pool.run(compiled_bodies.mixed, "here")
    assert {result["scale"] for result in results} == {plain["scale"]}
    check(results, plain, 1e-2)


@pytest.mark.full
@pytest.mark.parametrize(
    "body, kind, message",
    [
        (compiled_bodies.text_inside, "InvalidArgumentError", "AsString"),
        (compiled_bodies.adversaries, "ValueError", "after an optimizer has changed it"),
        (compiled_bodies.derived, "ValueError", "computes with the result of metric 'loss'"),
        (compiled_bodies.communicating, "ValueError", "can compile no communication"),
        (compiled_bodies.in_parts, "ValueError", "layer 'parts' (ChannelParallelDense)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.worlds(("collective", 2))
def test_what_cannot_be_compiled_ends_every_rank(pool, body, kind, message):
    for error, text in pool.run(body):
        assert error == kind and message in text, text


@pytest.mark.full
@pytest.mark.worlds(("served", 2))
def test_parameter_servers_compile_nothing(pool):
    (kind, text), *_ = pool.run(compiled_bodies.served)
    assert kind == "ValueError" and "ParameterServerStrategy" in text and "leave" in text


@pytest.mark.full
@pytest.mark.worlds(("local", 1))
def test_auto_is_what_keras_chooses(pool):
    ((found, printed),) = pool.run(compiled_bodies.chosen)
    assert found == {
        "here": False,
        "plain": True,
        "under the strategy": True,
        "eagerly": False,
        "synchronized": False,
        "unsupported": False,
        "derived": True,
        "derived, after a step": False,
    }
    said = [line for line in printed if "is not compiled by XLA (jit_compile='auto')" in line]
    assert len(said) == 2 and "synchronized=True" in said[0] and "metric 'loss'" in said[1]
