"""Which sizes are tried, and which is taken."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.callbacks.hyperparameters.batch_size_search import bounds, last_good, round_to, trial_sizes

NAN = math.nan
sizes = st.integers(1, 2**20)
ratios = st.floats(1e-6, 100.0)


@pytest.mark.parametrize(
    "initial, previous, ratio, maximum, expected",
    [
        (256, 256, 1.0, 2**20, (256, 512)),
        (256, 256, 4.0, 2**20, (256, 512)),  # a rate that rose lowers nothing
        (256, 512, 0.25, 2**20, (512, 1024)),  # 256 / sqrt(1/4)
        (256, 512, 0.5, 2**20, (362, 1024)),
        (256, 2048, 0.25, 2**20, (1024, 4096)),  # half the last one is more
        (256, 256, 0.01, 2**20, (2560, 512)),  # above the upper bound
        (256, 2**20, 1.0, 2**20, (2**19, 2**20)),
    ],
)
def test_bounds(initial, previous, ratio, maximum, expected):
    assert bounds(initial, previous, ratio, maximum) == expected


@given(sizes, sizes, ratios)
def test_bounds_are_halves_and_doubles(initial, previous, ratio):
    lower, upper = bounds(initial, previous, ratio, 2**20)
    assert lower >= max(previous // 2, initial)
    assert upper <= min(2 * previous, 2**20)


@pytest.mark.parametrize(
    "lower, upper, multiple, expected",
    [
        (64, 128, 64, [64, 128]),  # 64, 90.5, 128
        (128, 512, 64, [128, 192, 256, 384, 512]),
        (2560, 512, 64, [512]),
        (20, 40, 64, [64]),
        (8, 32, 1, [8, 11, 16, 23, 32]),
    ],
)
def test_trial_sizes(lower, upper, multiple, expected):
    assert trial_sizes(lower, upper, multiple) == expected


@given(sizes, sizes, st.sampled_from([1, 8, 64]))
def test_trial_sizes_grow_by_the_root_of_two(lower, upper, multiple):
    found = trial_sizes(lower, upper, multiple)
    low = min(lower, upper)
    assert found == sorted(set(found))
    assert all(size % multiple == 0 and size >= multiple for size in found)
    assert found[0] == round_to(low, multiple)
    assert found[-1] == round_to(found[-1], multiple) <= round_to(upper, multiple)
    assert found[-1] * math.sqrt(2) > upper - multiple
    for one, other in zip(found, found[1:], strict=False):
        assert other - one * math.sqrt(2) <= 1.25 * multiple


@given(st.floats(0.1, 2**20), st.integers(1, 256))
def test_rounding(size, multiple):
    rounded = round_to(size, multiple)
    assert rounded % multiple == 0
    assert rounded == multiple or abs(rounded - size) <= multiple / 2


@pytest.mark.parametrize(
    "losses, best, tried",
    [
        ([1.0, 0.9, 0.8], 2, 3),
        ([1.0, 1.01, 1.0], 2, 3),  # exactly the margin is good
        ([1.0, 1.02, 0.5], 0, 2),  # stops at the first that is worse
        ([1.0, 0.5, 1.005], 2, 3),  # against the first, not the best
        ([1.0, NAN, 0.5], 0, 2),
        ([1.0, math.inf, 0.5], 0, 2),
        ([NAN, 0.5], None, 1),
        ([math.inf, 0.5], None, 1),
        ([-1.0, -0.995, -0.98], 1, 3),
    ],
)
def test_the_last_good_one_wins(losses, best, tried):
    found, told = last_good(range(len(losses)), losses.__getitem__, 0.01)
    assert found == best
    assert len(told) == tried


@given(st.lists(st.floats(), min_size=1, max_size=9), st.floats(0, 1))
def test_all_before_the_chosen_were_good(losses, margin):
    found, told = last_good(range(len(losses)), losses.__getitem__, margin)
    good = [loss <= losses[0] + margin * abs(losses[0]) for loss in losses]
    good = [fine and math.isfinite(loss) for fine, loss in zip(good, losses, strict=True)]
    until = [*good, False].index(False)
    assert found == (until - 1 if until else None)
    assert len(told) == min(until + 1, len(losses))
