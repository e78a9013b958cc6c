"""Every rank its block of rows: ChainerMN's arithmetic, and rows that travel unharmed."""

from __future__ import annotations

import collections
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtk.communicators import LocalCommunicator
from dtk.data import empty_dataset, scatter, scatter_dataset, scatter_index
from dtk.data.rows import count_rows
from dtk.data.scatter import block
from dtk.data.sharing import group_of, permutation

from data.bodies import Twin, dataset
from support import bodies

COLLECTIVE = pytest.mark.parametrize("backend, size", [("collective", 2)])


def blocks(n_total, size, equal):
    return [block(n_total, rank, size, force_equal_length=equal) for rank in range(size)]


@pytest.mark.parametrize(
    "n_total, size, equal, expected",
    [
        (10, 3, True, [(0, 4), (3, 7), (6, 10)]),
        (10, 3, False, [(0, 4), (4, 7), (7, 10)]),
        (10, 4, True, [(0, 3), (2, 5), (5, 8), (7, 10)]),
        (10, 4, False, [(0, 3), (3, 6), (6, 8), (8, 10)]),
        (12, 4, True, [(0, 3), (3, 6), (6, 9), (9, 12)]),
        (2, 3, True, [(0, 1), (0, 1), (1, 2)]),
        (2, 3, False, [(0, 1), (1, 2), (2, 2)]),
        (0, 2, True, [(0, 0), (0, 0)]),
    ],
)
def test_the_blocks_are_chainermn_s(n_total, size, equal, expected):
    assert blocks(n_total, size, equal) == expected


@given(st.integers(0, 10_000), st.integers(1, 70))
@example(69, 70)
def test_blocks_cover_all_rows_and_neighbors_share_at_most_one(n_total, size):
    cut = blocks(n_total, size, equal=True)
    assert [end - begin for begin, end in cut] == [-(-n_total // size)] * size
    assert cut[0][0] == 0 and cut[-1][1] == n_total
    if n_total >= size:
        shared = [end - begin for (_, end), (begin, _) in zip(cut, cut[1:], strict=False)]
        assert set(shared) <= {0, 1}


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 60), st.integers(1, 5), st.booleans(), st.integers(0, 2**32 - 1))
def test_shuffled_parts_are_blocks_of_one_permutation(n_total, size, equal, seed):
    rows = np.arange(n_total)
    parts = [
        scatter_dataset(rows, Twin(rank, size), 0, True, seed, force_equal_length=equal)
        for rank in range(size)
    ]
    order = permutation(n_total, seed)
    assert sorted(order) == list(range(n_total))
    for part, (begin, end) in zip(parts, blocks(n_total, size, equal), strict=True):
        assert part.tolist() == order[begin:end].tolist()
    counts = collections.Counter(row for part in parts for row in part.tolist())
    assert len(counts) == n_total
    assert equal or set(counts.values()) <= {1}


KINDS = ("array", "arrays", "tensor", "samples", "strings", "dataset")


def rows_of(kind, part):
    """Row numbers of a part of `dataset(kind, ...)`, which must be of its kind still."""
    if kind == "arrays":
        (first, second), x = part["y"], part["x"]
        assert x.shape == (len(first), 1) and x[:, 0].tolist() == first.tolist()
        assert (second - first == 1).all()
        return first.tolist()
    if kind == "samples":
        assert all(values.tolist() == [1.5] * number for number, values in part)
        return [number for number, _ in part]
    if kind == "dataset":
        assert part.element_spec == dataset(kind, 1).element_spec
        elements = [(int(number), int(other)) for number, other in part]
        assert all(other == number + 1 for number, other in elements)
        return [number for number, _ in elements]
    assert isinstance(part, tf.Tensor if kind == "tensor" else np.ndarray)
    return [int(row) for row in (part.numpy() if kind == "tensor" else part)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_same_rows(kind, shuffle):
    """Of a rank that has the data itself."""
    group = Twin(1, 3)
    begin, end = scatter_index(11, group)
    expected = (permutation(11, 5) if shuffle else np.arange(11))[begin:end].tolist()
    part = scatter_dataset(dataset(kind, 11), group, shuffle=shuffle, seed=5)
    assert rows_of(kind, part) == expected
    assert count_rows(part) == len(empty_dataset(part)) == len(expected)


def test_samples_are_read_when_asked_for():
    read = []

    class Images:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            read.append(index)
            return index * 10

    part = scatter_dataset(Images(), Twin(2, 3), shuffle=True, seed=1)
    assert read == []
    order = permutation(9, 1)
    assert part[0] == order[6] * 10 and part[-1] == order[8] * 10
    assert list(part[1:]) == [row * 10 for row in order[7:]]
    assert read == [order[row] for row in (6, 8, 7, 8)]


def test_ragged_elements_keep_their_order_or_are_refused():
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.range([3, 0, 2]))
    part = scatter_dataset(ragged, Twin(0, 2))
    assert [element.numpy().tolist() for element in part] == [[0, 1, 2], []]
    with pytest.raises(ValueError, match="elements of RaggedTensorSpec cannot be kept in memory"):
        scatter_dataset(ragged, Twin(0, 2), shuffle=True)


def test_a_seed_that_is_not_given_follows_the_script_s():
    drawn = []
    for _ in range(2):
        np.random.seed(3)
        drawn.append(scatter_dataset(np.arange(50), Twin(0, 2), shuffle=True).tolist())
    assert drawn[0] == drawn[1] != list(range(25))


@pytest.mark.parametrize(
    "dataset, message",
    [
        (lambda two: two.repeat(), "without end has no known rows"),
        (lambda two: two.filter(lambda i: i > 0), "cannot count has no known rows"),
        ((np.zeros(3), np.zeros(4)), r"arrays of shapes \[\(3,\), \(4,\)\] do not hold the same"),
        (np.zeros(()), r"arrays of shapes \[\(\)\] do not hold"),
        (iter("ab"), "has no len"),
        (None, "rank 0 has no dataset to scatter"),
    ],
)
def test_what_cannot_be_counted_is_refused(dataset, message):
    if callable(dataset):  # made here: on ranks this file must run no operation of TensorFlow's
        dataset = dataset(tf.data.Dataset.range(2))
    with pytest.raises(ValueError, match=f"rank 1: .*{message}"):
        scatter_dataset(dataset, Twin(1, 2))


def test_whose_ranks_must_be_told():
    with pytest.raises(ValueError, match="got nothing outside a strategy's scope"):
        scatter_dataset(np.arange(3))
    with pytest.raises(ValueError, match="got a str"):
        scatter_index(3, "horovod")
    group = Twin(1, 2)
    assert group_of(group) is group
    with pytest.raises(ValueError, match="rank 1: n_total=-1 on rank 0"):
        scatter_index(-1, group)
    with pytest.raises(ValueError, match="root=2 is not a rank of 1"):
        scatter_index(4, LocalCommunicator(), 2)


def scattered_from(root):
    """Row numbers by kind, of data that `root` alone has."""
    strategy = bodies.strategy()
    parts = {}
    with mock.patch.object(scatter, "_MESSAGE", 100), strategy.scope():
        for kind in KINDS:
            whole = dataset(kind, 11) if strategy.rank == root else None
            parts[kind] = rows_of(kind, scatter.scatter_dataset(whole, None, root, True, 4))
    return parts


@COLLECTIVE
def test_a_dataset_that_one_rank_has_reaches_all(world, backend, size):
    """In messages of a few bytes, so that it takes many."""
    for rank, parts in enumerate(world(backend, size).run(scattered_from, 1)):
        order = permutation(11, 4)[slice(*block(11, rank, 2))].tolist()
        assert parts == dict.fromkeys(KINDS, order)


class _Unreadable(list):
    def __getitem__(self, index):
        raise OSError("no such image")


def scattered_apart():
    """What the ranks get that ask for different orders, and what they hear that gave wrong data."""
    strategy = bodies.strategy()
    rank = strategy.rank
    mine = scatter_dataset(np.arange(8), strategy, 0, rank == 0, 1 + rank)
    said = []
    for offered, root in (
        (np.arange(8 + rank), 0),
        (_Unreadable("ab") if rank == 0 else None, 0),
        (np.arange(8) if rank == 0 else None, 1),
    ):
        try:
            scatter_dataset(offered, strategy, root)
        except (ValueError, OSError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return mine.tolist(), said


@COLLECTIVE
def test_root_s_order_counts_and_everyone_hears_what_is_wrong(world, backend, size):
    (first, wrongs), (second, heard) = world(backend, size).run(scattered_apart)
    order = permutation(8, 1).tolist()
    assert (first, second) == (order[:4], order[4:])
    for rank, said in enumerate((wrongs, heard)):
        lengths, unreadable, nowhere = said
        assert f"rank {rank}: ranks have datasets of different lengths" in lengths
        assert "OSError: no such image" in unreadable
        assert f"rank {rank}: rank 1 has no dataset to scatter" in nowhere
