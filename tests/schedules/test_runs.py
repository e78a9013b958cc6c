"""Lists and pairs mean the same; the last value persists."""

from __future__ import annotations

import doctest
import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.schedules import runs

pairs = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 99)), min_size=1, max_size=10)


def parsed(schedule):
    return runs.parse_runs(schedule, "batch size", runs.is_count, "an integer of at least 1")


@given(pairs, st.integers(0, 600))
def test_a_value_lasts_for_its_count_and_the_last_for_ever(schedule, position):
    written = [value for count, value in schedule for _ in range(count)]
    found = runs.value_at(parsed(schedule), position)
    assert found == written[min(position, len(written) - 1)]
    assert runs.value_at(parsed(written), position) == found
    assert runs.ends_of(parsed(schedule))[-1] == len(written)


def test_lists_of_two_are_pairs_as_json_has_them():
    assert parsed([[3, 8], 16]) == parsed([(3, 8), (1, 16)])


@pytest.mark.parametrize(
    "schedule, said",
    [
        ([], "needs at least one value, got none"),
        (7, r"is a list of values or \(count, value\), got 7"),
        ("12", "got '12'"),
        ([0], "a value an integer of at least 1, got 0"),
        ([(0, 3)], r"got \(0, 3\)"),
        ([(True, 3)], r"got \(True, 3\)"),
    ],
)
def test_mistakes(schedule, said):
    with pytest.raises(ValueError, match=f"a batch size schedule .*{said}"):
        parsed(schedule)


@pytest.mark.parametrize(
    "name",
    [
        "polynomial_decay",
        "runs",
        "sample_rate",
        "samples",
        "slow_start",
        "time_constant",
        "warmup",
    ],
)
def test_the_examples_in_the_docstrings(name):
    failed, tried = doctest.testmod(importlib.import_module(f"dtk.schedules.{name}"))
    assert tried and not failed
