"""A tensor divided among ranks is the tensor."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from dtk.communicators import LocalCommunicator
from dtk.communicators.local import NullCommunicator
from dtk.communicators.shard import Shard
from dtk.compat.keras_variables import set_shard, shard_of

from support.world import communicator


@given(st.integers(1, 5), st.integers(0, 11), st.integers(0, 2))
def test_parts_of_all_ranks_follow_each_other(size, length, axis):
    whole = np.moveaxis(np.arange(length * 6.0).reshape(length, 2, 3), 0, axis)
    shards = [Shard.evenly(length, axis, NullCommunicator(rank, size)) for rank in range(size)]
    parts = [shard.part(whole).numpy() for shard in shards]
    np.testing.assert_array_equal(np.concatenate(parts, axis), whole)
    for shard, part in zip(shards, parts, strict=True):
        cut = np.take(whole, range(shard.offset, shard.offset + shard.size), axis)
        np.testing.assert_array_equal(part, cut)
        assert shard.part_shape(whole.shape) == part.shape
        assert shard.whole_shape(part.shape) == whole.shape


def gathers(graph):
    comm = communicator()
    for axis in (1,) if graph else range(3):
        shape = [3, 3, 3]
        shape[axis] = 5
        whole = tf.random.stateless_normal(shape, [1, 2], dtype=tf.float64)
        shards = [Shard.evenly(5, axis, comm)]
        if comm.size == 2:
            shards += [Shard(axis, (1, 4), comm), Shard(axis, (0, 5), comm)]
        for shard in shards:
            gather = tf.function(shard.whole) if graph else shard.whole
            np.testing.assert_array_equal(gather(shard.part(whole)), whole)


@pytest.mark.worlds(("local", 1), ("collective", 2), ("horovod-mpi", 2), ("collective", 3))
def test_the_whole_is_gathered(pool):
    pool.run(gathers, False)
    pool.run(gathers, True)


def test_marks_on_variables_and_what_is_refused():
    shard = Shard(1, (1, 2), NullCommunicator(1, 2))
    variable = keras.Variable(np.zeros((4, 2)))
    assert shard_of(variable) is None
    set_shard(variable, shard)
    assert shard_of(variable) is shard
    with pytest.raises(ValueError, match=r"rank 1: .*shape \(4, 3\); axis 1 should have length 2"):
        set_shard(keras.Variable(np.zeros((4, 3))), shard)
    with pytest.raises(ValueError, match="count axes from 0"):
        Shard(-1, (3,), LocalCommunicator())
    with pytest.raises(ValueError, match="one length, 0 or more, for each of 1 ranks"):
        Shard(0, (3, 2), LocalCommunicator())
    shard = Shard(0, (3,), LocalCommunicator())
    for cut_or_gather in (shard.part, shard.whole):
        with pytest.raises(ValueError, match="should have length 3"):
            cut_or_gather(np.zeros(4))
