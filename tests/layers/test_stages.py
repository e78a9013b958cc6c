"""The orders of a pipeline's stages, played through."""

from __future__ import annotations

import itertools

import pytest

from dtk.layers.pipeline import BACKWARD, FORWARD, gpipe, one_forward_one_backward

SIZES = list(itertools.product((1, 2, 3, 5), (1, 2, 4, 7)))


def orders(schedule, stages, parts):
    if schedule == "gpipe":
        return [gpipe(parts)] * stages
    return [one_forward_one_backward(stage, stages, parts) for stage in range(stages)]


def play(orders):
    """When the last stage ends, if every slot takes one unit; each stage follows its order."""
    ended, now, waiting = {}, [0] * len(orders), [list(order) for order in orders]
    while any(waiting):
        moved = False
        for stage, slots in enumerate(waiting):
            if not slots:
                continue
            before = stage + (-1 if slots[0][0] == FORWARD else 1)
            if 0 <= before < len(orders) and (before, slots[0]) not in ended:
                continue
            now[stage] = max(now[stage], ended.get((before, slots[0]), 0)) + 1
            ended[stage, slots.pop(0)] = now[stage]
            moved = True
        assert moved, "stages wait for each other for ever"
    return max(now)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages, parts", SIZES)
def test_every_pass_once_and_idle_no_longer_than_the_formula(schedule, stages, parts):
    chosen = orders(schedule, stages, parts)
    for stage, order in enumerate(chosen):
        assert sorted(order) == sorted(gpipe(parts))
        for part in range(parts):
            assert order.index((FORWARD, part)) < order.index((BACKWARD, part))
        held = itertools.accumulate(1 if direction == FORWARD else -1 for direction, _ in order)
        assert max(held) == (parts if schedule == "gpipe" else min(parts, stages - stage))
    idle = (stages - 1) / (parts + stages - 1)
    assert 1 - 2 * parts / play(chosen) == pytest.approx(idle)
