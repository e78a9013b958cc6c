"""Collectives outside of graphs: ranks that are in different ones say so, and wait for nobody."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.communicators.meeting import Call, differing
from dtk.errors import CommunicatorError
from dtk.strategies import AllReduceStrategy

from support import world

each = pytest.mark.worlds(("collective", 2), ("mpi-wheel", 2), ("horovod-mpi", 2))


def refusal(call):
    with pytest.raises(CommunicatorError) as refused:
        call()
    return str(refused.value)


def slid():
    """What ranks say that are in different collectives; that they go on; what they say later."""
    comm, one = world.communicator(), tf.constant(1.0)
    if comm.rank == 0:
        said = refusal(lambda: comm.allreduce(one))
    else:
        said = refusal(lambda: comm.allgather_object("longer than a number"))
    comm.resynchronize()
    return said, float(comm.allreduce(one)), refusal(lambda: comm.broadcast(one, comm.rank))


@each
def test_ranks_that_have_slid_say_so(pool):
    """MPI took one's bytes for another's, or both waited."""
    (one, total, roots), (other, same, _) = pool.run(slid)
    assert total == same == 2.0
    assert one.startswith("rank 0: ") and other.startswith("rank 1: ")
    for said in (one, other):  # of both ranks
        assert "rank 0 is in an all-reduce (float32 (), sum), number " in said
        assert "rank 1 is in an all-gather (rows of int64 ()), number " in said
        assert said.count("test_meeting.py:") == 2
    assert "rank 0 is in a broadcast (root 0)" in roots and "a broadcast (root 1)" in roots


def test_of_many_values_those_that_differ_are_named():
    alike = [f"float32 ({i},)" for i in range(9)]
    others = [*alike[:7], "int32 (7,)", *alike[8:], "float32 (9,)"]
    places = [Call("broadcast", given, "at 7") for given in (alike, others, alike)]
    said = differing(places).partition(". ")[0]
    assert said == (
        "ranks disagree: ranks 0, 2 are in a broadcast (value 8: float32 (7,)), at 7; "
        "rank 1 is in a broadcast (value 8: int32 (7,), value 10: float32 (9,)), at 7"
    )
    places = [Call("barrier", [], f"at {i}") for i in range(5)]
    assert "rank 2 is in a barrier, at 2; and 2 more. All" in differing(places)


def beside():
    """What another thread is told that takes part in the world's collectives."""
    comm, said = AllReduceStrategy().world, []
    thread = threading.Thread(
        target=lambda: said.append(refusal(comm.barrier)), name="another thread"
    )
    thread.start()
    thread.join()
    own = comm.split(0)
    thread = threading.Thread(target=lambda: said.append(own.allgather_object(comm.rank)))
    thread.start()
    among = [comm.allgather_object(10 + comm.rank) for _ in range(20)]
    thread.join()
    return [*said, among[-1]]


@each
def test_another_thread_needs_a_communicator_of_its_own(pool):
    for refused, of_thread, of_main in pool.run(beside):
        assert "a barrier in the thread 'another thread'" in refused
        assert "communicator.split(0)" in refused
        assert (of_thread, of_main) == ([0, 1], [10, 11])


def fit():
    """Losses of fits over data that rank 0 alone reads, in a thread of TensorFlow's."""
    strategy = AllReduceStrategy()
    keras.utils.set_random_seed(1)

    def batches():
        draw = np.random.default_rng(0)
        while True:
            x = draw.normal(size=(16, 8)).astype("float32")
            yield x, x[:, :1]

    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    held, losses = np.ones((20, 8), "float32"), []
    for _ in range(2):
        data = batches() if strategy.rank == 0 else None
        losses += model.fit(
            dtk.data.broadcast_iterator(data, strategy),
            steps_per_epoch=5,
            epochs=3,
            verbose=0,
            validation_data=(held, held[:, :1]),
        ).history["loss"]
    return losses


@pytest.mark.full_but("collective-2", why="in small, the test above has it over each wire")
@each
def test_fit_reads_what_one_rank_reads(pool):
    """Its collectives mixed with those of the main thread, and broke within two fits."""
    one, other = pool.run(fit)
    assert one == other and len(one) == 6
