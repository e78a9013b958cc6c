"""Every rank its own part of the data, the same number of steps on all."""

from __future__ import annotations

import numpy as np
import pytest

from data import bodies

pytestmark = pytest.mark.parametrize("backend, size", [("collective", 2)])


def write(folder, lines):
    names = []
    for i, numbers in enumerate(lines):
        names.append(folder / f"part-{i}.txt")
        names[-1].write_text("\n".join(map(str, numbers)))
    return [str(name) for name in names]


def test_elements_are_dealt_out_once(world, backend, size):
    ranks = world(backend, size).run(bodies.elements_of, None, 6)
    assert len({len(steps) for steps in ranks}) == 1
    rows = [row for steps in ranks for batch in steps for row in batch]
    assert sorted(rows) == list(range(23))


def test_whole_files_go_to_one_rank_and_steps_agree(world, backend, size, tmp_path):
    """Breaks as a deadlock: rank 0 has 9 rows, rank 1 has 4."""
    files = write(tmp_path, [range(5), range(5, 9), range(9, 13)])
    first, second = world(backend, size).run(bodies.elements_of, files, 4)
    assert len(first) == len(second) == 2
    assert [row for batch in second for row in batch] == [5, 6, 7, 8]
    assert [row for batch in first for row in batch] == [0, 1, 2, 3]


def test_rows_that_are_left_out_are_said_once(world, backend, size, tmp_path):
    files = write(tmp_path, [range(5), range(5, 9), range(9, 13)])
    first, second = world(backend, size).run(bodies.said_about, files, 4)
    assert first.startswith("shard: 5 of 13 rows are left out of every epoch, because ranks hold ")
    assert "[9, 4] rows and all take the 2 steps of the shortest" in first
    assert second == ""
    assert world(backend, size).run(bodies.said_about, None, 6) == ["", ""]


@pytest.mark.parametrize(
    "steps, message",
    [
        ((12, 12), "rank {rank}: steps=12, but rank 1 has data for 11; give at most that"),
        ((11, 9), "the same on all ranks (by rank: [11, 9])"),
        ((None, 9), "the same on all ranks (by rank: [None, 9])"),
        ((0, 0), "rank {rank}: steps=0, but it must be 1 or more"),
    ],
)
def test_steps_no_rank_has_data_for_are_refused_on_all(world, backend, size, steps, message):
    """Breaks as TensorFlow's cardinality error on one rank, while the other waits for it."""
    for rank, text in enumerate(world(backend, size).run(bodies.refused, None, 2, steps)):
        assert message.format(rank=rank) in text


def test_steps_that_everyone_has_data_for_are_taken(world, backend, size):
    ranks = world(backend, size).run(bodies.elements_of, None, 2, 11)
    assert [len(steps) for steps in ranks] == [11, 11]


def test_fewer_files_than_workers_is_fine(world, backend, size, tmp_path):
    files = write(tmp_path, [range(7)])
    ranks = world(backend, size).run(bodies.elements_of, files, 4)
    rows = [row for steps in ranks for batch in steps for row in batch]
    assert sorted(rows) == list(range(7))


@pytest.mark.parametrize("whole_first", [False, True])
def test_training_on_shards_weighs_rows_exactly(world, backend, size, whole_first):
    """With a fit on the whole dataset before, its step knew the rows of a batch; this must not."""
    results = world(backend, size).run(bodies.trained_on_shards, whole_first)
    for (mine, plain), logged, expected in results:
        assert np.linalg.norm(mine - plain) <= 1e-5 * np.linalg.norm(plain)
        for name, values in expected.items():
            np.testing.assert_allclose(logged[name], values, rtol=1e-5)


def test_an_endless_source_or_none_at_all_is_refused_on_all(world, backend, size):
    for rank, (endless, nothing) in enumerate(world(backend, size).run(bodies.no_end_no_start)):
        assert endless.startswith(f"rank {rank}: shard of an endless dataset needs steps=")
        assert "rank 1 has no data at all (rows by rank: [1, 0])" in nothing


def test_seeds_agree_where_they_must(world, backend, size):
    (first, drawn), (second, drawn_too) = world(backend, size).run(bodies.seeds)
    assert first == 7 != second
    assert drawn == drawn_too
