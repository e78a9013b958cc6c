"""A world is measured once, and all its ranks and later jobs go by the same numbers."""

from __future__ import annotations

import dataclasses
import os
import unittest.mock

import pytest

from dtk.communicators import cost_measurement
from dtk.errors import DtkError
from dtk.strategies import AllReduceStrategy
from dtk.strategies.start import processor

from support import world

some_worlds = pytest.mark.worlds(("collective", 2), ("horovod-gloo", 2))
two = pytest.mark.worlds(("collective", 2))


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path)


def kept(cache_folder):
    return sorted((cache_folder / "dtk" / "costs").iterdir())


def calibrated(way, cache, variables=(), cpu=None):
    """The costs this rank was told, with every processor called `cpu`."""
    communicator = world.communicator()
    names = [cpu or processor()] * communicator.size
    settings = {"DTK_CALIBRATE": way, "XDG_CACHE_HOME": cache, **dict(variables)}
    with unittest.mock.patch.dict(os.environ, settings):
        costs = cost_measurement.calibrate(communicator, "CPU:0", names)
    return None if costs is None else dataclasses.asdict(costs)


@pytest.mark.full_but("collective-2", why="tests/communicators holds all wires to the same")
@some_worlds
def test_measured_once_and_the_same_on_all_ranks(pool, cache, tmp_path):
    first, other = pool.run(calibrated, "", cache)
    assert first == other
    assert 1e-7 < first["message"] < 1 and 1e-13 < first["byte"] < 1e-5
    assert 1e-14 < first["operation"] < 1e-8
    assert len(kept(tmp_path)) == 1
    # As `dtk run` does over MPI: another folder for each job.
    of_job = {"OMPI_MCA_btl_sm_backing_directory": "/dev/shm/of-this-job"}
    assert pool.run(calibrated, "", cache, of_job) == [first, first]
    again = pool.run(calibrated, "again", cache)
    assert again[0] == again[1] != first
    assert pool.run(calibrated, "1", cache) == again


@pytest.mark.full("a cheaper test holds its rule")
@two
def test_other_processors_and_settings_are_another_world_and_what_differs_by_job_is_not(
    pool, cache, tmp_path
):
    mine, _ = pool.run(calibrated, "", cache, {"OMPI_MCA_orte_hnp_uri": "job 1"})
    assert pool.run(calibrated, "", cache, {"OMPI_MCA_orte_hnp_uri": "job 2"}) == [mine, mine]
    assert len(kept(tmp_path)) == 1
    pool.run(calibrated, "", cache, {"HOROVOD_CYCLE_TIME": "7"})
    pool.run(calibrated, "", cache, {"HOROVOD_GLOO_IFACE": "ib0"})
    pool.run(calibrated, "", cache, {}, "another kind")
    assert len(kept(tmp_path)) == 4


DAMAGED = [
    *("", "{", "[1]", '{"size": 2}'),
    '{"size": 2, "message": 1e-3, "byte": 0, "operation": 1e-11}',
    '{"size": 2, "message": "1e-3", "byte": 1e-9, "operation": 1e-11}',
]


@pytest.mark.full("a cheaper test holds its rule")
@two
def test_what_is_no_costs_is_measured_anew(pool, cache, tmp_path):
    pool.run(calibrated, "", cache)
    (file,) = kept(tmp_path)
    for text in DAMAGED:
        file.write_text(text)
        assert cost_measurement._read(file) is None
    first, other = pool.run(calibrated, "", cache)
    assert first == other is not None
    assert pool.run(calibrated, "", cache) == [first, first]
    # Nor is a cache that cannot be written any.
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "dtk").write_text("a file where a directory should be")
    first, other = pool.run(calibrated, "", str(blocked))
    assert first == other is not None


def refused(way, cache):
    with pytest.raises(DtkError) as told:
        calibrated(way, cache)
    return str(told.value)


@two
def test_it_can_be_turned_off(pool, cache, tmp_path):
    assert pool.run(calibrated, "0", cache) == [None, None]
    assert list(tmp_path.iterdir()) == []
    for told in pool.run(refused, "never", cache):
        assert "DTK_CALIBRATE='never' on rank 0: expected again" in told


def of_strategy(cache):
    """What a strategy has, and what a collective after that sums; null has nothing to measure."""
    settings = {"DTK_CALIBRATE": "1", "XDG_CACHE_HOME": cache}
    with unittest.mock.patch.dict(os.environ, settings):
        strategy = AllReduceStrategy(communicator=os.environ["DTK_TEST_COMMUNICATOR"])
        assert AllReduceStrategy(communicator="null").communicator.costs is None
    communicator = strategy.communicator
    total = communicator.allreduce([float(strategy.rank + 1)])[0]
    costs, communicator.costs = communicator.costs, None  # other tests' are not measured
    return dataclasses.asdict(costs), float(total)


@pytest.mark.full("a cheaper test holds its rule")
@some_worlds
def test_a_strategy_has_costs(pool, cache):
    (costs, total), (others, _) = pool.run(of_strategy, cache)
    assert costs == others and costs["size"] == 2
    assert total == 3.0
