"""Quantised gradients are what the equations of two stages say."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dtk import exchange as exchanges
from dtk.communicators.local import NullCommunicator
from dtk.exchange import Dense, Quantized, codec, quantized
from dtk.exchange.contract import ExchangeState, Trained

from support import bodies

two = pytest.mark.worlds(("collective", 2))
two_and_three = pytest.mark.worlds(("collective", 2), ("collective", 3))


def quantise(matrix, residual, bits):
    """By the codec, whose own test compares it with the equations."""
    wanted = matrix + residual
    made = codec.decode(codec.encode(wanted, bits), matrix.shape[1], bits).numpy()
    return made, wanted - made


SHAPES = [(3, 3, 4, 6), (40, 12), (7,), ()]


def gradients(rank, step, shapes=SHAPES):
    random = np.random.default_rng((rank, step))
    return [random.normal(size=shape).astype("float32") for shape in shapes]


def two_stages(size, steps, bits, shape):
    """What a gradient of one shape becomes, step by step, and what is left at the end."""
    columns, entries = codec.matrix_shape(shape)
    residuals = [np.zeros((columns, entries), "float32") for _ in range(size)]
    owner = np.zeros((columns, entries), "float32")
    index, results = SHAPES.index(shape), []
    for step in range(steps):
        total = np.zeros((columns, entries), "float32")
        for rank in range(size):
            matrix = codec.to_columns(gradients(rank, step)[index]).numpy()
            made, residuals[rank] = quantise(matrix, residuals[rank], bits)
            total += made
        made, owner = quantise(total, owner, bits)
        results.append(codec.from_columns(made, shape, "float32").numpy())
    return results, residuals, owner


def sums(value, steps, in_graph, broken=None):
    """Exchange `steps` lists of gradients; in step `broken` rank 0's are not finite.

    Returns what came out of each, what is remembered of all ranks, and the bytes of the last step.
    """
    communicator = bodies.strategy().communicator
    state = ExchangeState(communicator, "CPU:0")
    op = exchanges.parse(value).init(communicator, state, Trained())

    def reduce(given):
        with communicator.sequence(f"sums {value} {broken}"):
            return op.update(given)[0]

    reduce = tf.function(reduce) if in_graph else reduce
    results = []
    for step in range(steps):
        given = gradients(communicator.rank, step)
        if step == broken and communicator.rank == 0:
            given[1][2, 3] = np.inf
        before = communicator.bytes_sent
        results.append([r.numpy() for r in reduce([tf.constant(g) for g in given])])
    sent = communicator.bytes_sent - before
    return results, {name: item["value"] for name, item in state.collect().items()}, sent


@pytest.mark.full("a cheaper test holds its rule")
@two_and_three
@pytest.mark.parametrize(
    "bits, in_graph",
    [(1, True), pytest.param(1, False, marks=pytest.mark.full), (4, False), (11, True)],
    ids=["1-graph", "1-eager", "4-eager", "11-graph"],
)
def test_gradients_are_quantised_twice_and_what_is_left_is_kept(pool, bits, in_graph):
    results = pool.run(sums, Quantized(bits), 3, in_graph)
    for coded, shape in enumerate([(3, 3, 4, 6), (40, 12)]):
        made, residuals, owner = two_stages(pool.size, 3, bits, shape)
        for outputs, remembered, _ in results:
            for step in range(3):
                np.testing.assert_allclose(outputs[step][coded], made[step], atol=1e-4)
                assert np.array_equal(outputs[step][coded], results[0][0][step][coded])
            np.testing.assert_allclose(remembered[f"residual_{coded}"], residuals, atol=1e-4)
            np.testing.assert_allclose(remembered[f"owner_residual_{coded}"], owner, atol=1e-4)


MATRIX = (2, 5)
ENTRIES = arrays.arrays("float32", MATRIX, elements=st.floats(-1e3, 1e3, width=32))


@settings(max_examples=40)
@given(given=ENTRIES, left=ENTRIES, bits=st.sampled_from(codec.BITS))
def test_what_is_decoded_and_what_is_left_are_what_was_given_and_left_before(given, left, bits):
    communicator = NullCommunicator(0, 2)
    op = Quantized(bits).init(communicator, ExchangeState(communicator, "CPU:0"), Trained())
    _, (decoded,), (kept,) = op._quantise([tf.constant(given)], [tf.Variable(left)])
    size = np.abs(given + left).max(1, keepdims=True)
    assert (np.abs(decoded + kept - (given + left)) <= 1e-6 * size).all()


@two
def test_nothing_is_lost_and_packed_bits_travel(pool):
    """All that came out, and all that is left, is all that went in."""
    outputs, remembered, sent = pool.run(sums, Quantized(1), 4, True)[0]
    given = sum(gradients(rank, step)[1] for rank in range(2) for step in range(4))
    left = remembered["residual_1"].sum(0) + remembered["owner_residual_1"]
    np.testing.assert_allclose(sum(out[1] for out in outputs) + left.T, given, atol=1e-4)
    for i in (2, 3):  # vectors and scalars travel whole
        given = sum(gradients(rank, 0)[i] for rank in range(2))
        np.testing.assert_allclose(outputs[0][i], given, rtol=1e-6)
    assert set(remembered) == {f"{name}residual_{i}" for name in ("", "owner_") for i in range(2)}
    codes = sum(codec.bytes_of(*codec.matrix_shape(shape), 1) for shape in [(3, 3, 4, 6), (40, 12)])
    # Half of the codes goes to the other owner, and the other half to everyone, in words.
    assert sent <= codes + 4 * (7 + 1) + 16
    _, _, dense = pool.run(sums, Dense(), 1, False)[0]
    assert dense == 4 * sum(int(np.prod(shape)) for shape in SHAPES)


@pytest.mark.full("equations of lossy exchanges are tested by themselves")
@two
def test_a_step_that_is_not_finite_says_so_everywhere_and_leaves_no_trace(pool):
    left = pool.run(sums, Quantized(1), 2, True, 1)
    before = pool.run(sums, Quantized(1), 1, True)
    for (_, remembered, _), (_, expected, _) in zip(left, before, strict=True):
        # On the other rank, and of other columns, as well: what it sent was not applied.
        for name, value in expected.items():
            np.testing.assert_array_equal(remembered[name], value, err_msg=name)
    broken = pool.run(sums, Quantized(1), 3, True, 1)
    for outputs, remembered, _ in broken:
        assert not np.isfinite(outputs[1][1]).all()
        assert all(np.isfinite(value).all() for value in remembered.values())
        assert all(np.isfinite(out).all() for out in outputs[2])


def test_every_number_of_bits_codes_kernels():
    """16 bits once coded nothing, and tests that took them for "nearly lossless" tested Dense."""
    for bits in codec.BITS:
        coded = [quantized.is_coded(s, tf.float32, bits) for s in ((64, 32), (3, 3, 4, 6), (64,))]
        assert coded == [True, True, False]
