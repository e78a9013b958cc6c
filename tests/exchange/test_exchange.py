"""What exchanges send is what their equations say, and training with them is still training."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk import exchange as exchanges
from dtk.callbacks import CommunicationStats
from dtk.communicators.local import LocalCommunicator, NullCommunicator, NullTransport
from dtk.exchange import BlockMomentum, Delayed, Dense, ModelAveraging, Quantized, WarmStart
from dtk.exchange.contract import ExchangeState, Trained
from dtk.exchange.dense import DenseOp

from exchange.exchanged import (
    ROUNDING,
    apart,
    exchanging,
    make,
    perceptron,
    plain,
    same_everywhere,
    train,
)
from support import bodies, cases

two = pytest.mark.worlds(("collective", 2))
two_ways = pytest.mark.worlds(("collective", 2), ("horovod-mpi", 2))


@pytest.mark.full_but("collective-2-fp16-momentum-0.001")
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
    results = pool.run(train, value, optimizer)
    assert apart(same_everywhere(results), weights) <= tolerance
    for _, own, taken in results:
        assert taken == steps
        assert own == results[0][1]
        for name, values in history.items():
            np.testing.assert_allclose(own[name], values, rtol=50 * tolerance)


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("mpi-wheel", 2))
def test_half_precision_over_mpi_is_close_to_one_process(pool):
    """It was refused there, with the advice to use itself."""
    results = pool.run(train, "bf16", "momentum")
    assert apart(same_everywhere(results), plain("momentum")[0]) <= 5e-3


def feature(name, value):
    """One case of tests/support/cases.py with an exchange."""
    with exchanging(value) as strategy:
        return cases.CASES[name](strategy)


# What an exchange must not get in the way of; 16 bits lose next to nothing.
@pytest.mark.full("equations of lossy exchanges are tested by themselves")
@two
@pytest.mark.parametrize(
    "name",
    [
        *("two optimizers", "eager steps", "sparse embedding gradients clipped"),
        *("fewer rows than workers", "steps per execution", "single batches"),
        *("two models compiled in one scope", "own train step"),
    ],
)
def test_features_of_fit_with_a_lossy_exchange(pool, name):
    expected, results = bodies.run_plain(name), pool.run(feature, name, "16bit")
    for result in results:
        for key, value in expected.items():
            np.testing.assert_allclose(result[key], value, rtol=5e-2, atol=5e-3, err_msg=key)


@pytest.mark.full("equations of lossy exchanges are tested by themselves")
@two
def test_ranks_hold_the_same_bits_after_500_steps(pool):
    options = {"steps_per_execution": 10}
    results = pool.run(train, "1bit", "momentum", 160, 16, 50, options, timeout=120)
    same_everywhere(results)
    assert results[0][1]["loss"][-1] < 0.1 * results[0][1]["loss"][0]


def delayed_by_hand(steps=10, batch=16):
    """Gradients at each step's weights, applied one step later; by one process."""
    x, y = cases.rows(160)
    model = perceptron(None, "sgd")
    optimizer, kept = keras.optimizers.SGD(0.05, momentum=0.9), None
    for start in range(0, steps * batch, batch):
        with tf.GradientTape() as tape:
            made = model(x[start : start + batch], training=True)
            loss = cases.crossentropy()(y[start : start + batch], made)
        now = tape.gradient(loss, model.trainable_variables)
        if kept is not None:
            optimizer.apply_gradients(zip(kept, model.trainable_variables, strict=True))
        kept = now
    return bodies.flat(model.get_weights())


def delayed(value, steps=10, batch=16):
    x, y = cases.rows(steps * batch)
    with exchanging(value) as strategy:
        model = perceptron(strategy, make("momentum"))
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    return bodies.flat(model.get_weights()), int(model.optimizer.iterations)


@pytest.mark.full_but("*dtype=None*")
@two
@pytest.mark.parametrize("value", [Delayed(), Delayed(Dense("float16"))], ids=str)
def test_delayed_applies_each_gradient_one_step_later(pool, value):
    expected = delayed_by_hand()
    results = pool.run(delayed, value)
    assert apart(same_everywhere(results), expected) <= (
        ROUNDING if value.exchange == Dense() else 1e-2
    )
    assert [steps for _, steps in results] == [9, 9], "the first step applies nothing"


# What it costs.


def stats(value, validation=False):
    """The logs of CommunicationStats."""
    x, y = cases.rows(96)
    with exchanging(value) as strategy:
        model = perceptron(strategy, make("sgd"))
        options = {"validation_data": (x, y)} if validation else {}
        callbacks = [CommunicationStats()]
        model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=callbacks, **options)
    return model.history.history["comm_bytes"], model.history.history["comm_share"]


@pytest.mark.full("equations of lossy exchanges are tested by themselves")
@two_ways
def test_bytes_of_a_step_are_counted(pool):
    parameters = 64 * 32 + 32 + 32 * 10 + 10
    dense, share = pool.run(stats, Dense())[0]
    # Gradients, and two metrics of two numbers.
    assert all(4 * parameters <= sent <= 4 * parameters + 64 for sent in dense)
    assert all(0 < part < 1 for part in share)
    half, _ = pool.run(stats, "fp16", True)[0]
    assert all(2 * parameters <= sent <= 2 * parameters + 64 for sent in half)
    coded, _ = pool.run(stats, "1bit")[0]
    assert all(sent < dense[0] / 8 for sent in coded)
    # 96 rows an epoch are three blocks; between them nothing is sent.
    blocks, _ = pool.run(stats, BlockMomentum(block_size=32))[0]
    assert all(sent == pytest.approx(4 * parameters / 2, rel=0.05) for sent in blocks)


def bytes_of_sequences(value):
    """Bytes per step of a Dense layer on sequences."""
    x, y = np.ones((32, 4, 64), "float32"), np.ones((32, 32), "float32")
    layers = [keras.layers.Dense(32), keras.layers.GlobalAveragePooling1D()]
    with exchanging(value) as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.Input((4, 64)), *layers])
            model.compile("sgd", "mse")
        history = model.fit(x, y, batch_size=16, verbose=0, callbacks=[CommunicationStats()])
    return history.history["comm_bytes"]


@pytest.mark.full("equations of lossy exchanges are tested by themselves")
@two_ways
def test_kernels_of_dense_layers_on_sequences_are_coded(pool):
    # Their gradients did not tell their shapes, and travelled whole.
    [dense] = pool.run(bytes_of_sequences, Dense())[0]
    [coded] = pool.run(bytes_of_sequences, "1bit")[0]
    assert coded < dense / 8


# Another number of workers.


class TwoHeads(keras.Model):
    """Trains one of two heads, by gradients of both, of which one is None."""

    def __init__(self):
        super().__init__()
        self.heads = [keras.layers.Dense(2), keras.layers.Dense(2)]
        self.trained = 0

    def build(self, shape):
        for head in self.heads:
            head.build(shape)

    def call(self, x):
        return self.heads[self.trained](x)


def heads_apart():
    """Changes of both heads' kernels in the first step that trains the second one."""
    with exchanging(Delayed()) as strategy, strategy.scope():
        model = TwoHeads()
        model.build((None, 4))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = np.ones((8, 4), "float32"), np.zeros((8, 2), "float32")
    model.train_on_batch(x, y)
    before = [np.array(head.kernel) for head in model.heads]
    model.trained = 1
    model.make_train_function(force=True)
    model.train_on_batch(x, y)
    pairs = zip(model.heads, before, strict=True)
    return [np.abs(head.kernel - kernel).max() for head, kernel in pairs]


@two
def test_what_is_remembered_of_one_weight_is_not_added_to_another(pool):
    """It was numbered by the gradients that are not None."""
    assert pool.run(heads_apart) == [[0, 0]] * 2


def make_variables(state, rows):
    for kind in ("same", "sum", "mean"):
        state.variable(kind, kind, (2,))
    state.variable("stripe", "stripe", (rows[1] - rows[0], 2), rows=rows)


SAVED = {
    "same": {"kind": "same", "value": np.float32([1, 2])},
    "sum": {"kind": "sum", "value": np.float32([[1, 2], [3, 4]])},
    "mean": {"kind": "mean", "value": np.float32([[1, 2], [3, 4]])},
    "stripe": {"kind": "stripe", "value": np.float32([[1, 2], [3, 4], [5, 6], [7, 8]])},
}


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_what_is_remembered_goes_to_any_number_of_workers(first):
    """Before the variables are made, or after."""
    for size, rows, expected in (
        (4, (1, 2), {"same": [1, 2], "sum": [1, 1.5], "mean": [2, 3], "stripe": [[3, 4]]}),
        (2, (2, 4), {"same": [1, 2], "sum": [3, 4], "mean": [3, 4], "stripe": [[5, 6], [7, 8]]}),
    ):
        state = ExchangeState(NullCommunicator(1, size), "CPU:0")
        steps = [lambda: state.restore(SAVED), lambda: make_variables(state, rows)]  # noqa: B023
        for step in steps if first else reversed(steps):
            step()
        held = {name: state.variable(name, name, (2,)).numpy().tolist() for name in SAVED}
        assert held == expected


def test_one_worker_carries_what_several_remembered():
    from dtk.strategies import AllReduceStrategy
    from dtk.trainer.distributed_model import trainer_of

    strategy = AllReduceStrategy(communicator="local", exchange="1bit")
    trainer = trainer_of(perceptron(strategy, make("sgd")))
    trainer.restore_exchange({"0/0/sum": SAVED["sum"]})
    assert trainer.exchange_state() == {"0/0/sum": SAVED["sum"]}


def test_what_no_step_asked_for_yet_is_saved_again():
    """Of one of two lists of gradients, too."""
    state = ExchangeState(LocalCommunicator(), "CPU:0")
    state.restore(SAVED)
    assert state.collect() == SAVED
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
        (lambda: BlockMomentum(64, momentum=1.0), "BlockMomentum: momentum=1.0; expected"),
        (lambda: BlockMomentum(64, momentum="0.9"), "BlockMomentum: momentum='0.9'; expected"),
        (lambda: BlockMomentum(64, rate=0.0), "BlockMomentum: rate=0.0; expected"),
        (lambda: BlockMomentum(3).check(NullCommunicator(0, 4)), "less than a row for each of 4"),
        (lambda: ModelAveraging(0), "ModelAveraging(period=0); expected a number of rows"),
        (lambda: WarmStart(Quantized(1), samples=0), "WarmStart(samples=0)"),
        (lambda: WarmStart("1bit", samples=10), "WarmStart(exchange='1bit')"),
        (lambda: WarmStart(WarmStart(Dense(), 5), samples=10), "expected another exchange"),
        (lambda: WarmStart(BlockMomentum(3), 10).check(NullCommunicator(0, 4)), "less than a row"),
        (lambda: Delayed(BlockMomentum(64)), "Delayed(exchange=BlockMomentum"),
        (lambda: Delayed(WarmStart(Dense(), 5)), "WarmStart(Delayed(...), samples=...)"),
        (lambda: exchanges.parse("17bit"), "expected one of 'auto', 'fp16', 'bf16', '1bit' to '16"),
        (lambda: Dense("bfloat16").check(adding(tf.float16)), 'sent; use exchange="fp16" or'),
        (lambda: Dense("float16").check(adding(tf.float32)), 'sent; use communicator="mpi" or'),
        (lambda: Dense("bfloat16").check(linked(tf.float16)), "null adds no bfloat16 up"),
        (lambda: Delayed(Dense("bfloat16")).check(adding(tf.float16)), "adds no bfloat16 up"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(ValueError) as raised:
        make()
    assert message in str(raised.value)


def linked(dtype):
    """A communicator that adds one dtype up from GPU to GPU, and all through the host."""
    communicator = NullCommunicator(0, 2)
    communicator.gpu_transport = NullTransport(0, 2)
    communicator.gpu_transport.reduces = frozenset({dtype})
    return communicator


def adding(dtype):
    """A communicator that adds up one dtype, as Horovod does float16 and no bfloat16."""
    communicator = NullCommunicator(0, 2)
    communicator.host_transport.reduces = frozenset({dtype})
    return communicator


def test_an_exchange_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="expected a value of dtk.exchange"):
        exchanges.parse(8)
    with pytest.raises(TypeError, match=r'ParameterServerStrategy\("async", exchange=Downpour'):
        exchanges.parse(exchanges.Downpour())


def test_32_bits_are_whole_gradients():
    assert exchanges.parse("3bit") == Quantized(3) and exchanges.parse("13bit") == Quantized(13)
    off, communicator = exchanges.parse("32bit"), NullCommunicator(0, 2)
    op = off.init(communicator, ExchangeState(communicator, "CPU:0"), Trained())
    assert isinstance(op, DenseOp) and not off.remembers
    assert Quantized(1).remembers


def refused(options):
    """The message of the error that training raises."""
    x, y = cases.rows(16)
    with pytest.raises(ValueError) as told, exchanging(options["value"]) as strategy:
        if options.get("sparse"):
            cases.sparse_embedding_gradients_clipped(strategy)
        model = perceptron(strategy, make(options.get("optimizer", "sgd")))
        if options.get("own_loop"):
            gradients = [tf.zeros_like(v) for v in model.trainable_variables]
            strategy.run(lambda: model.optimizer.apply(gradients, model.trainable_variables))
        model.fit(x, y, batch_size=8, verbose=0)
    return str(told.value)


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
    assert all(message in told for told in pool.run(refused, options))


def test_with_one_worker_every_exchange_is_the_identity_and_says_so(capsys):
    from dtk.strategies import AllReduceStrategy

    x, y = cases.rows(32)
    trained = []
    for value in (None, "1bit", Delayed(), WarmStart(BlockMomentum(8, momentum=0.5), 8)):
        strategy = value and AllReduceStrategy(communicator="local", exchange=value)
        said = "one worker has nobody to exchange gradients with" in capsys.readouterr().out
        assert said == (value is not None)
        model = perceptron(strategy, make("sgd"))
        model.fit(x, y, batch_size=8, verbose=0)
        trained.append(bodies.flat(model.get_weights()))
    assert all(np.array_equal(weights, trained[0]) for weights in trained)


def test_examples():
    for module in pkgutil.walk_packages(exchanges.__path__, "dtk.exchange."):
        found = doctest.testmod(importlib.import_module(module.name), extraglobs={"tf": tf})
        assert not found.failed, module.name
