"""Numbers with units are read, and what is none is refused with what was expected."""

import doctest
import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.planning import inputs
from dtk.planning.inputs import PlanError


@given(st.floats(1e-3, 1e6))
def test_units_of_one_kind_agree(value):
    assert inputs.parse_seconds("x", f"{value!r}ms") == pytest.approx(
        inputs.parse_seconds("x", f"{value * 1000!r} us")
    )
    assert inputs.parse_bandwidth("x", f"{value!r}Mbit/s") == pytest.approx(
        inputs.parse_bandwidth("x", f"{value / 8!r}MB/s")
    )


@given(st.integers(1, 10**12))
def test_whole_numbers_come_back(value):
    assert inputs.parse_count("x", str(value)) == value
    assert inputs.parse_count("x", f"{value}k") == 1000 * value


@given(st.integers(1, 100), st.integers(100, 10**6))
def test_dots_double_and_end_where_they_should(first, last):
    found = inputs.parse_counts("x", f"{first},...,{last}")
    assert (found[0], found[-1]) == (first, last)
    for before, after in zip(found, found[1:], strict=False):
        assert after == 2 * before or after == last
    assert inputs.parse_counts("x", "8,1,2,...,8,3") == (1, 2, 3, 4, 8)


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (inputs.parse_seconds, "85", "unknown unit '', expected one of s, ms, us, ns"),
        (inputs.parse_seconds, "85m", "unknown unit 'm', expected one of s, ms, us, ns"),
        (inputs.parse_seconds, "-1ms", "below 0, expected such as 85ms"),
        (inputs.parse_seconds, "soon", "not a number with a unit, expected such as 85ms"),
        (inputs.parse_seconds, "1.2.3ms", "not a number with a unit"),
        (inputs.parse_seconds, "1e999s", "too large"),
        (inputs.parse_bandwidth, "1Gbps", "unknown unit 'Gbps', expected one of bit/s, kbit/s"),
        (inputs.parse_bandwidth, "0Mbit/s", "nothing would ever arrive"),
        (inputs.parse_count, "0", "expected a whole number, 1 or more"),
        (inputs.parse_count, "1.5", "expected a whole number, 1 or more"),
        (inputs.parse_counts, "1,...", "`...` needs an end; try 1,...,4096"),
        (inputs.parse_counts, "...,8", "`...` has nothing to double"),
        (inputs.parse_counts, "1,,8", "not a number with a unit"),
        (inputs.parse_counts, "0,1", "--it 0: expected a whole number, 1 or more"),
    ],
)
def test_a_mistake_names_the_option_and_what_was_expected(read, text, message):
    with pytest.raises(PlanError) as refused:
        read("--it", text)
    assert str(refused.value).startswith("--it ")
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["inputs", "plan_methods", "calibration", "tables"])
def test_the_examples_run(name):
    failed, attempted = doctest.testmod(importlib.import_module(f"dtk.planning.{name}"))
    assert attempted and not failed
