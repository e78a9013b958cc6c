"""What follows from the time a message and a byte take."""

from __future__ import annotations

import doctest
import importlib
import time

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from dtk.communicators import cost_measurement, determinism
from dtk.communicators.base import Communicator
from dtk.communicators.costs import ONE_HOP_MOST, Costs, fit_allreduces
from dtk.communicators.local import NullCommunicator, NullTransport
from dtk.exchange import Dense
from dtk.exchange.contract import ExchangeState, Trained
from dtk.exchange.factors import Factored

SIZES = st.integers(2, 4096)
SECONDS = st.floats(1e-6, 1.0)
PER_BYTE = st.floats(1e-10, 1e-8)


def ring(size, message, byte, length):
    """2 (P-1) messages of a P-th each: Patarasuk and Yuan 2009."""
    return 2 * (size - 1) * (message + byte * length / size)


@given(SIZES, SECONDS, PER_BYTE)
def test_two_all_reduces_tell_what_a_message_and_a_byte_take(size, message, byte):
    lengths = (1 << 17, 1 << 30)
    seconds = {length: ring(size, message, byte, length) for length in lengths}
    found = fit_allreduces(size, seconds)
    assert found[0] == pytest.approx(message, rel=1e-2, abs=1e-6)
    assert found[1] == pytest.approx(byte, rel=1e-2)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), "1e-3", None])
def test_costs_are_numbers_above_0(wrong):
    with pytest.raises(ValueError, match="Costs\\(byte="):
        Costs(2, 1e-3, wrong, 1e-11)


@given(SECONDS, PER_BYTE, st.integers(1 << 20, 1 << 30))
def test_no_other_bucket_is_much_faster(message, byte, total):
    """A bucket costs its message; what is left when the last gradient is there costs its bytes."""
    costs = Costs(2, message, byte, 1e-11)

    def seconds(bucket):
        return total / bucket * message + bucket * byte

    chosen = seconds(costs.bucket(total))
    best = min(seconds(bucket) for bucket in (1 << n for n in range(16, 31)) if bucket <= total)
    # half_length is a power of two: off by the square root of two at most, which costs little.
    assert chosen <= 1.1 * best or costs.bucket(total) > total


@given(SIZES, SECONDS, PER_BYTE)
def test_one_hop_is_used_only_where_it_is_faster(size, message, byte):
    costs = Costs(size, message, byte, 1e-11)
    length = costs.one_hop
    assert 0 < length <= ONE_HOP_MOST
    hop = message + (size - 1) * byte * length
    # As far as the ratio is known, to a power of two.
    assert hop <= 1.5 * ring(size, message, byte, length) + (size - 1) * byte


class Counting(NullTransport):
    def reduce(self, flat, op, label):
        self.buckets = len(flat)
        return super().reduce(flat, op, label)


def test_a_communicator_goes_by_its_costs_where_they_are_known():
    counting, found = Counting(0, 2), []
    nobody = Communicator(counting, ("host",) * 2)
    for byte in (1e-10, None, 8e-8):  # a fast link, one that was not measured, a slow one
        nobody.costs = byte and Costs(2, message=1e-3, byte=byte, operation=1e-11)
        nobody.allreduce([tf.zeros([2**15])] * 100)  # of 128 KiB
        found.append(counting.buckets)
    assert found[0] < found[1] == 4 < found[2]


def test_factors_are_sent_by_its_costs():
    sent = {}
    for operation in (1e-12, 1.0):
        nobody = NullCommunicator(0, 2)
        nobody.costs = Costs(2, message=1e-3, byte=1e-9, operation=operation)
        gradient = Factored(tf.ones([8, 256]), tf.ones([8, 256]))
        Dense().init(nobody, ExchangeState(nobody, "CPU:0"), Trained()).update([gradient])
        sent[operation] = nobody.bytes_sent
    assert sent[1e-12] < 4 * 256 * 256 < sent[1.0]


@pytest.mark.parametrize(
    "module", ["buckets", "costs", "cost_measurement", "objects", "plain_data"]
)
def test_examples(module):
    assert doctest.testmod(importlib.import_module(f"dtk.communicators.{module}")).failed == 0


def test_print_says_what_was_chosen():
    text = str(Costs(4, 0.5e-3, 4e-9, 2e-11))
    for part in ("4 ranks", "0.50 ms", "4.0 ms", "20 ms", "buckets", "one hop", "factors"):
        assert part in text


def test_nothing_is_chosen_by_measured_costs_where_tensorflow_is_to_be_deterministic():
    """TensorFlow tells in no public way whether it is; see what `determinism` asks it instead."""
    from tensorflow.python.framework import config

    nobody, costs = NullCommunicator(0, 3), Costs(3, 1e-3, 8e-8, 1e-11)
    assert (nobody.alike, nobody.costs) == (False, None)
    nobody.learn(alike=True, costs=costs)
    assert (nobody.alike, nobody.costs) == (True, costs) and not determinism.is_asked_for()
    tf.config.experimental.enable_op_determinism()
    try:
        assert determinism.is_asked_for() and nobody.costs is None
        assert tf.function(determinism.is_asked_for)().numpy()  # while a step is traced, too
    finally:
        config.disable_op_determinism()
    assert nobody.costs == costs and not determinism.is_asked_for()


def test_what_else_a_machine_does_is_not_taken_for_a_cost():
    # Medians kept for later jobs sent 42 MB in a step for 1.7, since other programs had been busy.
    pauses = iter([0.0, 0.05, 0.05, 0.0, 0.05, 0.05])
    assert cost_measurement._time(lambda: time.sleep(next(pauses)), 5) < 0.04
