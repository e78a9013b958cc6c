"""What each rank reads is what `describe` says."""

from __future__ import annotations

import pytest

from data import describing
from dtk.input.slicing import bounds

KINDS = ["arrays", "dataset", "distributed", "PyDataset", "shard"]


@pytest.mark.parametrize("backend, size", [("local", 1), ("collective", 2), ("mirrored", 2)])
def test_every_kind_of_data(world, backend, size):
    processes = 1 if backend == "mirrored" else size
    mirrored = backend == "mirrored"
    start = "local" if mirrored else backend
    ranks = world(start, processes).run(describing.described, size if mirrored else 0)
    assert list(ranks[0]) == (KINDS[:-1] if mirrored else KINDS)
    for name, (found, printed) in ranks[0].items():
        assert str(found) + "\n" == printed, "rank 0 prints the table"
        for other in ranks[1:]:
            assert other[name] == (found, ""), "the others return the same, and print nothing"
        assert found.notes == ()
        assert [share.rank for share in found.shares] == list(range(size))
        for share in found.shares:
            assert share.batches == 3
            assert share.types[0] == "float32[]"
            for batch, (part, rows) in enumerate(zip(share.parts, (4, 4, 2), strict=True)):
                first, end = bounds(rows, share.rank, size)
                assert (part.taken, part.rows) == (end - first, rows)
                if name == "shard" and size > 1:  # every rank takes every second row
                    assert (part.first, part.sample) == (None, str(4 * batch + share.rank))
                else:  # rows are told by their numbers
                    assert (part.first, part.sample) == (first, str(4 * batch + first))
        hashes = [part.hash for share in found.shares for part in share.parts]
        assert len(set(hashes)) == 3 * size
    assert ranks[0]["arrays"][0].shares[0].types[1].endswith("[2, 3]")


@pytest.mark.parametrize("backend, size", [("collective", 2)])
def test_what_does_not_look_right_is_noted(world, backend, size):
    ranks = world(backend, size).run(describing.odd)
    assert ranks[0] == ranks[1]
    told = ranks[0]
    batches = {name: [share.batches for share in shares] for name, (shares, _) in told.items()}
    assert batches["endless"] == batches["endless PyDataset"] == [describing.ENDLESS] * 2
    assert batches["uncounted"] == [None, None]
    samples = [share.parts[0].sample for share in told["endless"][0]]
    assert samples == ["a", "d"]
    assert all(share.parts[0].hash for share in told["ragged"][0])
    notes = {name: noted for name, (_, noted) in told.items() if noted}
    assert set(notes) == {"differs", "repeats", "uneven"}
    assert notes["differs"][0].startswith("ranks 0 and 1 were given different rows in batch 0; ")
    assert notes["repeats"][0].startswith("ranks 0 and 1 read the same rows in batch 0; ")
    assert notes["uneven"][0].startswith("rank 0 has 1 batch, rank 1 2 batches; every rank must")


@pytest.mark.parametrize("backend, size", [("collective", 2)])
def test_what_cannot_be_described_is_refused(world, backend, size):
    for said in world(backend, size).run(describing.refused):
        assert said["generator"].startswith("TypeError: cannot describe a generator; expected")
        assert said["list"].startswith("TypeError: cannot describe a list; expected")
        assert said["strategy"].startswith("ValueError: strategy is a _DefaultDistributionStrategy")
        assert said["batch size"].startswith("ValueError: batch_size=2 with a _BatchDataset, which")
        assert said["none"] == "ValueError: batches=0, expected 1 or more"
