"""What exchanges send is what their equations say, and training with them is still training."""

from __future__ import annotations

import doctest
import functools
import importlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dtk import exchange as exchanges
from dtk.communicators.local import LocalCommunicator
from dtk.communicators.null import NullCommunicator
from dtk.exchange import (
    BlockMomentum,
    Delayed,
    Dense,
    ModelAveraging,
    Quantized,
    WarmStart,
    codec,
    quantized,
)
from dtk.exchange.base import BatchPart, Trained
from dtk.exchange.dense import DenseOp
from dtk.exchange.state import ExchangeState
from exchange import exchanged

two = pytest.mark.worlds(("collective", 2))
two_and_three = pytest.mark.worlds(("collective", 2), ("collective", 3))
two_ways = pytest.mark.worlds(("collective", 2), ("horovod-mpi", 2))

# A step of float32 sums in another order.
ROUNDING = 1e-5


def apart(one, other):
    return np.linalg.norm(one - other) / np.linalg.norm(other)


def same_everywhere(results):
    """All ranks' weights, which must be one bit pattern; returns them."""
    for result in results:
        assert np.array_equal(result[0], results[0][0])
    return results[0][0]


@functools.cache
def plain(*args, **kwargs):
    return exchanged.train("plain", *args, **kwargs)


# The two stages.


def quantise(matrix, residual, bits):
    """By the codec, whose own test compares it with the equations."""
    wanted = matrix + residual
    made = codec.decode(codec.encode(wanted, bits), matrix.shape[1], bits).numpy()
    return made, wanted - made


def two_stages(size, steps, bits, shape):
    """What a gradient of one shape becomes, step by step, and what is left at the end."""
    columns, entries = codec.matrix_shape(shape)
    residuals = [np.zeros((columns, entries), "float32") for _ in range(size)]
    owner = np.zeros((columns, entries), "float32")
    index, results = exchanged.SHAPES.index(shape), []
    for step in range(steps):
        total = np.zeros((columns, entries), "float32")
        for rank in range(size):
            matrix = codec.to_columns(exchanged.gradients(rank, step)[index]).numpy()
            made, residuals[rank] = quantise(matrix, residuals[rank], bits)
            total += made
        made, owner = quantise(total, owner, bits)
        results.append(codec.from_columns(made, shape, "float32").numpy())
    return results, residuals, owner


@two_and_three
@pytest.mark.parametrize(
    "bits, in_graph",
    [(1, True), pytest.param(1, False, marks=pytest.mark.full), (4, False), (11, True)],
    ids=["1-graph", "1-eager", "4-eager", "11-graph"],
)
def test_gradients_are_quantised_twice_and_what_is_left_is_kept(pool, bits, in_graph):
    results = pool.run(exchanged.sums, Quantized(bits), 3, in_graph)
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
def test_nothing_is_lost_only_late(pool):
    """All that came out, and all that is left, is all that went in."""
    outputs, remembered, _ = pool.run(exchanged.sums, Quantized(1), 4, True)[0]
    given = sum(exchanged.gradients(rank, step)[1] for rank in range(2) for step in range(4))
    left = remembered["residual_1"].sum(0) + remembered["owner_residual_1"]
    np.testing.assert_allclose(sum(out[1] for out in outputs) + left.T, given, atol=1e-4)


@two
def test_vectors_and_scalars_travel_whole(pool):
    outputs, remembered, _ = pool.run(exchanged.sums, Quantized(1), 1, True)[0]
    for i in (2, 3):
        given = sum(exchanged.gradients(rank, 0)[i] for rank in range(2))
        np.testing.assert_allclose(outputs[0][i], given, rtol=1e-6)
    assert set(remembered) == {f"{name}residual_{i}" for name in ("", "owner_") for i in range(2)}


@two
def test_a_step_that_is_not_finite_says_so_everywhere_and_leaves_no_trace(pool):
    left = pool.run(exchanged.sums, Quantized(1), 2, True, 1)
    before = pool.run(exchanged.sums, Quantized(1), 1, True)
    for (_, remembered, _), (_, expected, _) in zip(left, before, strict=True):
        # On the other rank, and of other columns, as well: what it sent was not applied.
        for name, value in expected.items():
            np.testing.assert_array_equal(remembered[name], value, err_msg=name)
    broken = pool.run(exchanged.sums, Quantized(1), 3, True, 1)
    for outputs, remembered, _ in broken:
        assert not np.isfinite(outputs[1][1]).all()
        assert all(np.isfinite(value).all() for value in remembered.values())
        assert all(np.isfinite(out).all() for out in outputs[2])


@two
def test_the_wire_carries_packed_bits(pool):
    _, _, sent = pool.run(exchanged.sums, Quantized(1), 2, True)[0]
    codes = sum(codec.bytes_of(*codec.matrix_shape(shape), 1) for shape in [(3, 3, 4, 6), (40, 12)])
    whole = 4 * (7 + 1)
    # Half of the codes goes to the other owner, and the other half to everyone, in words.
    assert sent <= codes + whole + 16
    _, _, dense = pool.run(exchanged.sums, Dense(), 2, True)[0]
    assert dense == 4 * sum(int(np.prod(shape)) for shape in exchanged.SHAPES)


@pytest.mark.parametrize("bits", codec.BITS)
def test_every_number_of_bits_codes_kernels(bits):
    """16 bits once coded nothing, and tests that took them for "nearly lossless" tested Dense."""
    assert quantized.is_coded((64, 32), tf.float32, bits)
    assert quantized.is_coded((3, 3, 4, 6), tf.float32, bits)
    assert not quantized.is_coded((64,), tf.float32, bits)


def test_columns_are_striped_as_in_cntk():
    assert quantized.stripes(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert quantized.stripes(2, 3) == [(0, 1), (1, 2), (2, 2)]


# Training.


@two
@pytest.mark.parametrize(
    "value, optimizer, tolerance",
    [
        ("16bit", "adam", 1e-2),
        ("8bit", "momentum", 2e-2),
        ("fp16", "momentum", 1e-3),
        ("bf16", "sgd", 5e-3),
        ("16bit", "accumulated", 1e-3),
        ("16bit", "scaled", 1e-3),
        (WarmStart(Quantized(1), samples=10_000), "adam", ROUNDING),
        (WarmStart(BlockMomentum(64), samples=10_000), "adam", ROUNDING),
        (WarmStart(Delayed(), samples=10_000), "momentum", ROUNDING),
        (Dense(), "adam", ROUNDING),
    ],
    ids=str,
)
def test_training_is_close_to_one_process(pool, value, optimizer, tolerance):
    weights, history, steps = plain(optimizer)
    results = pool.run(exchanged.train, value, optimizer)
    assert apart(same_everywhere(results), weights) <= tolerance
    for _, own, taken in results:
        assert taken == steps
        assert own == results[0][1]
        for name, values in history.items():
            np.testing.assert_allclose(own[name], values, rtol=50 * tolerance)


# What an exchange must not get in the way of; 16 bits lose next to nothing.
@two
@pytest.mark.parametrize(
    "name",
    [
        "two optimizers",
        "eager steps",
        "sparse embedding gradients clipped",
        "fewer rows than workers",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in (
                "steps per execution",
                "single batches",
                "two models compiled in one scope",
                "own train step",
            )
        ),
    ],
)
def test_features_of_fit_with_a_lossy_exchange(pool, name):
    from strategies import bodies

    expected, results = bodies.run_plain(name), pool.run(exchanged.feature, name, "16bit")
    for result in results:
        for key, value in expected.items():
            np.testing.assert_allclose(result[key], value, rtol=5e-2, atol=5e-3, err_msg=key)


@two
def test_ranks_hold_the_same_bits_after_500_steps(pool):
    options = {"steps_per_execution": 10}
    results = pool.run(exchanged.train, "1bit", "momentum", 160, 16, 50, options, timeout=120)
    same_everywhere(results)
    assert results[0][1]["loss"][-1] < 0.1 * results[0][1]["loss"][0]


@two
@pytest.mark.parametrize(
    "value, optimizer, points",
    [
        (WarmStart(Quantized(1), samples=1437), "adam", 0.01),
        (WarmStart(BlockMomentum(256), samples=1437), "momentum", 0.02),
        (WarmStart(ModelAveraging(64), samples=1437), "momentum", 0.02),
    ],
    ids=str,
)
def test_accuracy_on_the_digits(pool, value, optimizer, points):
    expected, _ = exchanged.accuracy("plain", optimizer, 12)
    for tested, _ in pool.run(exchanged.accuracy, value, optimizer, 12, timeout=120):
        assert tested >= expected - points


@two
@pytest.mark.parametrize("value", [Delayed(), Delayed(Dense("float16"))], ids=str)
def test_delayed_applies_each_gradient_one_step_later(pool, value):
    expected = exchanged.delayed_by_hand()
    results = pool.run(exchanged.delayed, value)
    assert apart(same_everywhere(results), expected) <= (
        ROUNDING if value.exchange == Dense() else 1e-2
    )
    assert [steps for _, steps in results] == [9, 9], "the first step applies nothing"


# Blocks.


@two
@pytest.mark.parametrize(
    "nesterov, expected", [(True, [0.7, 0.25]), (False, [0.8, 0.5])], ids=["nesterov", "plain"]
)
def test_block_momentum_is_the_vector_of_the_original(pool, nesterov, expected):
    """W = 1, locals .9 and .7: V = .2; then changes of -.1 and -.3: V = .3."""
    value = BlockMomentum(block_size=2, nesterov=nesterov)
    locals_ = [(0.9, 0.7), (expected[0] - 0.1, expected[0] - 0.3)]
    for after in pool.run(exchanged.combined, value, locals_):
        np.testing.assert_allclose([weight for weight, _, _ in after], expected, rtol=1e-6)
        assert [slot for _, slot, _ in after] == [0.0, 0.0], "local momentum is forgotten"
        assert all(together for _, _, together in after)


def moved_by(value, changes, rows=None):
    """How far one weight is moved by each block of a world whose other ranks change nothing."""
    communicator, weight, after = NullCommunicator(0, 4), tf.Variable(0.0), []
    state = ExchangeState(communicator, "CPU:0")
    op = value.init(communicator, state, Trained([weight], []))
    for index, change in enumerate(changes):
        before = float(weight)
        count = value.block_size if rows is None else rows[index]
        part = BatchPart(tf.constant(count, tf.int64), tf.constant(0.25))
        op.update([tf.constant(0.0)], part)
        weight.assign_add(change)
        op.count(part)
        op.close()
        after.append(float(weight) - before)
    return after


@pytest.mark.parametrize("momentum, eta", [(None, 0.75), (0.5, 0.5), (0.0, 0.0)])
@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_a_blocks_changes_go_into_the_weights_over_several(momentum, eta, rate):
    """In all 1 + eta times as far with Nesterov's momentum: the docstring once said once."""
    for nesterov, gain in ((False, 1.0), (True, 1.0 + eta)):
        value = BlockMomentum(64, momentum=momentum, rate=rate, nesterov=nesterov)
        moved = moved_by(value, [100.0] + [0.0] * 60)
        parts = 100.0 * rate * gain * (1 - eta) * eta ** np.arange(61)
        np.testing.assert_allclose(moved, parts, rtol=1e-4, atol=1e-4)
        assert sum(moved) == pytest.approx(100.0 * rate * gain, rel=1e-4)


def test_the_rate_that_takes_nesterovs_gain_back():
    value = BlockMomentum(64, rate=4 / (2 * 4 - 1))
    assert sum(moved_by(value, [100.0] + [0.0] * 60)) == pytest.approx(100.0, rel=1e-4)


def test_less_than_a_block_counts_for_less():
    value = BlockMomentum(64, nesterov=False)
    moved = moved_by(value, [100.0] + [0.0] * 60, [16] + [64] * 60)
    assert sum(moved) == pytest.approx(100.0 * (1 - 0.75**0.25) / (1 - 0.75), rel=1e-4)


def test_the_step_that_reaches_the_samples_of_a_warm_start_is_the_last_exact_one():
    """Delayed applies nothing in its first step, by which it is told apart."""
    communicator = NullCommunicator(0, 2)
    state, applied = ExchangeState(communicator, "CPU:0"), tf.Variable(0.0)
    op = WarmStart(Delayed(), samples=6).init(communicator, state, Trained())
    part, seen = BatchPart(tf.constant(2, tf.int64), tf.constant(0.5)), []
    for step in range(1, 6):
        update = op.update([tf.constant(float(step))], part)
        if update.applied is None or update.applied:
            applied.assign_add(update.gradients[0])
        op.count(part)
        seen.append(float(applied))
    assert seen == [1, 3, 6, 6, 10], "steps 1 to 3 at once, 4 a step later"


@two
def test_an_open_block_leaves_weights_apart(pool):
    first, second = pool.run(exchanged.combined, BlockMomentum(block_size=4), [(0.9, 0.7)])
    assert first == [(pytest.approx(0.9), 5.0, False)]
    assert second == [(pytest.approx(0.7), 5.0, False)]


@two
def test_model_averaging_weighs_by_rows(pool):
    value = ModelAveraging(period=2)
    for after in pool.run(exchanged.combined, value, [(0.9, 0.5)], [3, 1]):
        assert after == [(pytest.approx(0.8), 5.0, True)]


@two_and_three
@pytest.mark.parametrize("nesterov", [True, False])
def test_block_momentum_trains_as_its_equations_say(pool, nesterov):
    value = BlockMomentum(block_size=48, nesterov=nesterov)
    eta = 1 - 1 / pool.size
    expected = exchanged.apart_by_hand(pool.size, eta, nesterov, 0.9, 3)
    results = pool.run(exchanged.apart, value, 0.9)
    assert apart(same_everywhere(results), expected) <= ROUNDING
    assert all(own == results[0][1] for _, own in results), "logs are the same everywhere"


@two
def test_averaging_every_step_of_plain_sgd_is_one_process(pool):
    """The mean of steps from the same weights is the step of the mean."""
    weights, history, _ = plain("sgd", 160)
    results = pool.run(exchanged.train, ModelAveraging(period=8), "sgd", 160)
    assert apart(same_everywhere(results), weights) <= ROUNDING
    np.testing.assert_allclose(results[0][1]["accuracy"], history["accuracy"])


@two
def test_evaluating_closes_a_block_and_averages_statistics(pool):
    first, second = pool.run(exchanged.statistics_apart)
    assert not np.array_equal(first[0], second[0]), "between blocks workers train apart"
    assert first[1] == second[1]
    assert np.array_equal(first[2], second[2])
    np.testing.assert_allclose(first[2], (first[0] + second[0]) / 2, atol=1e-6)


@two
def test_a_block_is_closed_before_anything_looks_at_the_weights(pool):
    """Single batches and `fit` once went on from rank 0's weights; callbacks saw a rank's own."""
    (own, found, changed), (other, others, also) = pool.run(exchanged.around_open_blocks)
    for i in range(3):
        assert not np.array_equal(own[i], other[i])
        np.testing.assert_allclose(found[i], (own[i] + other[i]) / 2, atol=1e-6)
    for one, another in zip(found, others, strict=True):
        assert np.array_equal(one, another)
    assert changed == also == 0.0, "evaluating leaves the optimizer's state alone"


@two
@pytest.mark.parametrize("value", [BlockMomentum(10_000), Quantized(8)], ids=str)
def test_numbers_that_no_metric_counts_are_the_same_everywhere(pool, value):
    """ReduceLROnPlateau and the like once decided on each rank by its own loss."""
    first, second = pool.run(exchanged.own_logs, value)
    assert first == second


@two
def test_moving_statistics_are_exact_in_a_warm_start(pool):
    """19 rows are 16 and 3, and the 3 are two and one: they weigh by their rows."""
    warm = pool.run(exchanged.normalised, WarmStart(BlockMomentum(64), samples=10_000), 19)
    dense = pool.run(exchanged.normalised, Dense(), 19)
    for one, other in zip(warm, dense, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@two
@pytest.mark.parametrize("value", [Quantized(1), BlockMomentum(32)], ids=str)
def test_training_that_is_taken_back_leaves_no_trace(pool, value):
    """AutoBatchSize trains a little with each size, and puts everything back."""
    before, changed, after = pool.run(exchanged.tried, value)[0]
    assert before.keys() == changed.keys() == after.keys() and before
    assert any(not np.array_equal(before[name], changed[name]) for name in before)
    for name, kept in before.items():
        assert np.array_equal(after[name], kept), name


@two
def test_blocks_within_one_execution(pool):
    arguments = BlockMomentum(block_size=32), "momentum", 155, 16, 2
    alone = pool.run(exchanged.train, *arguments)
    several = pool.run(exchanged.train, *arguments, {"steps_per_execution": 5})
    assert apart(same_everywhere(several), same_everywhere(alone)) <= ROUNDING


# What it costs.


@two_ways
def test_bytes_of_a_step_are_counted(pool):
    parameters = 64 * 32 + 32 + 32 * 10 + 10
    dense, share = pool.run(exchanged.stats, Dense())[0]
    # Gradients, and two metrics of two numbers.
    assert all(4 * parameters <= sent <= 4 * parameters + 64 for sent in dense)
    assert all(0 < part < 1 for part in share)
    half, _ = pool.run(exchanged.stats, "fp16", True)[0]
    assert all(2 * parameters <= sent <= 2 * parameters + 64 for sent in half)
    coded, _ = pool.run(exchanged.stats, "1bit")[0]
    assert all(sent < dense[0] / 8 for sent in coded)
    # 96 rows an epoch are three blocks; between them nothing is sent.
    blocks, _ = pool.run(exchanged.stats, BlockMomentum(block_size=32))[0]
    assert all(sent == pytest.approx(4 * parameters / 2, rel=0.05) for sent in blocks)


@two_ways
def test_kernels_of_dense_layers_on_sequences_are_coded(pool):
    # Their gradients did not tell their shapes, and travelled whole.
    [dense] = pool.run(exchanged.bytes_of_sequences, Dense())[0]
    [coded] = pool.run(exchanged.bytes_of_sequences, "1bit")[0]
    assert coded < dense / 8


# Another number of workers.


def state_with(rank, size, rows):
    state = ExchangeState(NullCommunicator(rank, size), "CPU:0")
    for kind in ("same", "sum", "mean"):
        state.variable(kind, kind, (2,))
    state.variable("stripe", "stripe", (rows[1] - rows[0], 2), rows=rows)
    return state


SAVED = {
    "same": {"kind": "same", "value": np.float32([1, 2])},
    "sum": {"kind": "sum", "value": np.float32([[1, 2], [3, 4]])},
    "mean": {"kind": "mean", "value": np.float32([[1, 2], [3, 4]])},
    "stripe": {"kind": "stripe", "value": np.float32([[1, 2], [3, 4], [5, 6], [7, 8]])},
}


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_what_is_remembered_goes_to_another_number_of_workers(first):
    """Before the variables are made, or after."""
    if first:
        state = ExchangeState(NullCommunicator(1, 4), "CPU:0")
        state.restore(SAVED)
        for kind in ("same", "sum", "mean"):
            state.variable(kind, kind, (2,))
        state.variable("stripe", "stripe", (1, 2), rows=(1, 2))
    else:
        state = state_with(1, 4, (1, 2))
        state.restore(SAVED)
    held = {name: state.variable(name, name, (2,)).numpy().tolist() for name in SAVED}
    assert held == {"same": [1, 2], "sum": [1, 1.5], "mean": [2, 3], "stripe": [[3, 4]]}


def test_the_same_number_of_workers_gets_back_what_each_had():
    state = state_with(1, 2, (2, 4))
    state.restore(SAVED | {"stripe": {"kind": "stripe", "value": np.zeros((4, 2))}})
    assert state.variable("sum", "sum", (2,)).numpy().tolist() == [3, 4]


def test_one_worker_carries_what_several_remembered():
    from dtk.strategies import AllReduceStrategy
    from dtk.trainer.model_scope import trainer_of

    strategy = AllReduceStrategy(communicator="local", exchange="1bit")
    trainer = trainer_of(exchanged.perceptron(strategy, exchanged.make("sgd")))
    trainer.restore_exchange({"0/0/sum": SAVED["sum"]})
    assert trainer.exchange_state() == {"0/0/sum": SAVED["sum"]}


def test_what_no_step_asked_for_yet_is_saved_again():
    state = ExchangeState(LocalCommunicator(), "CPU:0")
    state.restore(SAVED)
    assert state.collect() == SAVED


def test_what_one_of_two_lists_of_gradients_remembers_is_saved_again():
    state = ExchangeState(LocalCommunicator(), "CPU:0")
    state.restore({f"{i}/same": SAVED["same"] for i in range(2)})
    state.part("0/").variable("same", "same", (2,))
    assert set(state.collect()) == {"0/same", "1/same"}


def test_a_checkpoint_keeps_bfloat16(tmp_path):
    state = ExchangeState(LocalCommunicator(), "CPU:0")
    state.variable("sum", "sum", (2,), tf.bfloat16).assign([1.5, -2.0])
    np.savez(tmp_path / "saved.npz", state.collect()["sum"]["value"])
    saved = {"sum": {"kind": "sum", "value": np.load(tmp_path / "saved.npz")["arr_0"]}}
    state.variable("sum", "sum", (2,)).assign([0.0, 0.0])
    state.restore(saved)
    assert state.variable("sum", "sum", (2,)).numpy().tolist() == [1.5, -2.0]


def test_what_another_exchange_remembered_is_refused():
    state = ExchangeState(LocalCommunicator(), "CPU:0")
    state.restore({"same": SAVED["same"]})
    with pytest.raises(ValueError, match="the checkpoint remembers same of shape"):
        state.variable("same", "same", (3,))


# Bad input.


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Quantized(0), "expected 1 to 16, or 32 for whole gradients, as Dense()"),
        (lambda: Quantized(33), "expected 1 to 16, or 32"),
        (lambda: Quantized(17), "float32, whose mantissa has 24 bits"),
        (lambda: Quantized(31), "float32, whose mantissa has 24 bits"),
        (lambda: Quantized(True), "Quantized(bits=True)"),
        (lambda: Quantized(3.0), "Quantized(bits=3.0)"),
        (lambda: Dense("float64"), "'float16' or 'bfloat16', or None"),
        (lambda: BlockMomentum(0), "BlockMomentum(block_size=0); expected a number of rows"),
        (lambda: BlockMomentum(64, momentum=1.0), "BlockMomentum(momentum=1.0)"),
        (lambda: BlockMomentum(64, rate=0.0), "BlockMomentum(rate=0.0)"),
        (
            lambda: BlockMomentum(3).check(NullCommunicator(0, 4)),
            "block_size=3) has less than a row for each of 4",
        ),
        (lambda: ModelAveraging(0), "ModelAveraging(period=0); expected a number of rows"),
        (lambda: WarmStart(Quantized(1), samples=0), "WarmStart(samples=0)"),
        (lambda: WarmStart("1bit", samples=10), "WarmStart(exchange='1bit')"),
        (lambda: WarmStart(WarmStart(Dense(), 5), samples=10), "expected another exchange"),
        (
            lambda: WarmStart(BlockMomentum(3), samples=10).check(NullCommunicator(0, 4)),
            "has less than a row",
        ),
        (lambda: Delayed(BlockMomentum(64)), "Delayed(exchange=BlockMomentum"),
        (lambda: Delayed(WarmStart(Dense(), 5)), "WarmStart(Delayed(...), samples=...)"),
        (lambda: exchanges.parse("17bit"), "expected one of 'auto', 'fp16', 'bf16', '1bit' to '16"),
        (lambda: Dense("bfloat16").check(OnlyFloat16(0, 2)), "adds no bfloat16 up"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(ValueError) as raised:
        make()
    assert message in str(raised.value)


class OnlyFloat16(NullCommunicator):
    """What Horovod can add up of half precision."""

    reduces = NullCommunicator.reduces - {tf.bfloat16}


def test_an_exchange_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="expected a value of dtk.exchange"):
        exchanges.parse(8)
    with pytest.raises(TypeError, match=r'ParameterServerStrategy\("async", exchange=Downpour'):
        exchanges.parse(exchanges.Downpour())


def test_32_bits_are_whole_gradients():
    assert exchanges.parse("3bit") == Quantized(3) and exchanges.parse("13bit") == Quantized(13)
    off = exchanges.parse("32bit")
    communicator = NullCommunicator(0, 2)
    state = ExchangeState(communicator, "CPU:0")
    op = off.init(communicator, state, Trained())
    assert isinstance(op, DenseOp) and not off.remembers
    assert Quantized(1).remembers


@two
@pytest.mark.parametrize(
    "options, message",
    [
        ({"value": Delayed(), "sparse": True}, "rows of a table"),
        ({"value": Delayed(), "optimizer": "accumulated"}, "does not go with gradient accumul"),
        ({"value": BlockMomentum(64), "optimizer": "ema"}, "use_ema=True averages the weights"),
        ({"value": BlockMomentum(64), "optimizer": "accumulated"}, "a block is a window of steps"),
        ({"value": BlockMomentum(64), "own_loop": True}, "only fit and train_on_batch know"),
        ({"value": WarmStart(Quantized(1), 64), "own_loop": True}, "use the exchange without it"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_what_cannot_work_together_is_refused(pool, options, message):
    for told in pool.run(exchanged.refused, options):
        assert message in told


@pytest.mark.parametrize(
    "value",
    [
        "1bit",
        "fp16",
        Delayed(),
        BlockMomentum(8, momentum=0.5),
        ModelAveraging(8),
        WarmStart(Quantized(1), 8),
    ],
    ids=str,
)
def test_with_one_worker_every_exchange_is_the_identity_and_says_so(capsys, value):
    from dtk.strategies import AllReduceStrategy

    strategy = AllReduceStrategy(communicator="local", exchange=value)
    assert "one worker has nobody to exchange gradients with" in capsys.readouterr().out
    x, y = exchanged.cases.rows(32)
    trained = []
    for under in (strategy, None):
        model = exchanged.perceptron(under, exchanged.make("sgd"))
        model.fit(x, y, batch_size=8, verbose=0)
        trained.append(exchanged.bodies.flat(model.get_weights()))
    assert np.array_equal(*trained)


@pytest.mark.parametrize(
    "module",
    ["auto", "block_momentum", "delayed", "dense", "state", "names", "quantized", "warm_start"],
)
def test_examples(module):
    assert doctest.testmod(importlib.import_module(f"dtk.exchange.{module}")).failed == 0
