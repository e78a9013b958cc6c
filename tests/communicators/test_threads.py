"""Ranks of one host share its cores."""

from __future__ import annotations

import doctest
import os

import pytest

from dtk.cluster import place as processor
from dtk.cluster.place import Place
from dtk.communicators import create

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < (os.cpu_count() or 1), reason="bound to some of the cores"
)


def test_the_example_runs():
    assert doctest.testmod(processor).failed == 0


def divided(local_size, **given):
    processor.divide_cores(Place("mpi", rank=0, size=8, local_size=local_size), given)
    return given


def test_each_rank_gets_its_part():
    cores = os.cpu_count()
    assert divided(2) == dict.fromkeys(processor.THREADS, str(max(1, cores // 2)))
    assert divided(100 * cores) == dict.fromkeys(processor.THREADS, "1")
    assert divided(1) == {}
    for name in processor.THREADS:  # what a user or launcher has set stays
        assert divided(2, **{name: "7"}) == {name: "7"}


def test_whoever_makes_a_communicator_shares(monkeypatch):
    for name in processor.THREADS:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    create("null", Place("mpi", rank=0, size=2, local_size=2))
    assert {name: os.environ[name] for name in processor.THREADS} == divided(2)


def test_bound_to_a_core_it_keeps_that():
    allowed = os.sched_getaffinity(0)
    if len(allowed) == 1:
        pytest.skip("there is one core only")
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert divided(2) == {}
    finally:
        os.sched_setaffinity(0, allowed)
