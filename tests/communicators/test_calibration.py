"""A world is measured once, and all its ranks and later jobs go by the same numbers."""

from __future__ import annotations

import json

import pytest

from communicators import calibration_bodies as bodies

some_worlds = pytest.mark.worlds(("collective", 2), ("horovod-gloo", 2))


@pytest.fixture
def cache(pool, tmp_path):
    pool.run(bodies.set_environment, str(tmp_path))
    return tmp_path / "dtk" / "costs.json"


@some_worlds
def test_measured_once_and_the_same_on_all_ranks(pool, cache):
    first, other = pool.run(bodies.calibrated, "")
    assert first == other
    assert 1e-6 < first["message"] < 1 and 1e-12 < first["byte"] < 1e-5
    assert 1e-14 < first["operation"] < 1e-8
    assert len(json.loads(cache.read_text())) == 1
    assert pool.run(bodies.calibrated, "") == [first, first]
    again = pool.run(bodies.calibrated, "again")
    assert again[0] == again[1] != first
    assert pool.run(bodies.calibrated, "1") == again


@pytest.mark.worlds(("collective", 2))
def test_other_processors_are_another_world(pool, cache):
    mine, _ = pool.run(bodies.calibrated, "", "one kind")
    others, _ = pool.run(bodies.calibrated, "", "another kind")
    assert mine != others
    assert pool.run(bodies.calibrated, "", "one kind") == [mine, mine]
    assert len(json.loads(cache.read_text())) == 2


@pytest.mark.worlds(("collective", 2))
@pytest.mark.parametrize("text", ["", "{", '{"x": {"size": 2}}', "[1]"])
def test_a_damaged_file_is_measured_anew(pool, cache, text):
    cache.parent.mkdir()
    cache.write_text(text)
    first, other = pool.run(bodies.calibrated, "")
    assert first == other is not None
    assert first in json.loads(cache.read_text()).values()


@pytest.mark.worlds(("collective", 2))
def test_a_cache_that_cannot_be_written_is_none(pool, cache):
    cache.parent.write_text("a file where a directory should be")
    first, other = pool.run(bodies.calibrated, "")
    assert first == other is not None


@pytest.mark.worlds(("collective", 2))
def test_it_can_be_turned_off(pool, cache):
    assert pool.run(bodies.calibrated, "0") == [None, None]
    assert not cache.exists()


@pytest.mark.worlds(("collective", 2))
def test_a_way_there_is_not(pool, cache):
    for told in pool.run(bodies.raised, "never"):
        assert "DTK_CALIBRATE='never' on rank 0: expected again" in told


@some_worlds
def test_a_strategy_by_name_has_costs(pool, cache):
    (costs, total), (others, _) = pool.run(bodies.of_strategy)
    assert costs == others and costs["size"] == 2
    assert total == 3.0
