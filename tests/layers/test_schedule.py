"""The orders of a pipeline's stages, played through."""

from __future__ import annotations

import doctest
import importlib

import pytest

from dtk.layers.pipelining.schedule import (
    Pass,
    ScheduleSlot,
    bubble,
    gpipe,
    one_forward_one_backward,
)

MODULES = ["layers.pipelining.schedule", "layers.pipeline", "layers.whole"]


@pytest.mark.parametrize("module", MODULES)
def test_examples(module):
    assert doctest.testmod(importlib.import_module(f"dtk.{module}")).failed == 0


SIZES = [(stages, parts) for stages in (1, 2, 3, 5) for parts in (1, 2, 4, 7)]


def orders(schedule, stages, parts):
    if schedule == "gpipe":
        return [gpipe(parts)] * stages
    return [one_forward_one_backward(stage, stages, parts) for stage in range(stages)]


def play(orders):
    """When each stage ends each slot, if all take one unit; every stage follows its order."""
    stages = len(orders)
    ended: dict[tuple[int, ScheduleSlot], int] = {}
    now, position = [0] * stages, [0] * stages
    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        moved = False
        for stage, order in enumerate(orders):
            if position[stage] == len(order):
                continue
            slot = order[position[stage]]
            before = stage - 1 if slot.direction is Pass.FORWARD else stage + 1
            needs = 0
            if 0 <= before < stages:
                if (before, slot) not in ended:
                    continue
                needs = ended[before, slot]
            now[stage] = max(now[stage], needs) + 1
            ended[stage, slot] = now[stage]
            position[stage] += 1
            moved = True
        assert moved, "stages wait for each other for ever"
    return max(now)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages, parts", SIZES)
def test_every_pass_once_and_idle_no_longer_than_the_formula(schedule, stages, parts):
    chosen = orders(schedule, stages, parts)
    for order in chosen:
        assert sorted(order, key=str) == sorted(gpipe(parts), key=str)
        for part in range(parts):
            assert order.index(ScheduleSlot(Pass.FORWARD, part)) < order.index(
                ScheduleSlot(Pass.BACKWARD, part)
            )
    steps = play(chosen)
    assert 1 - 2 * parts / steps == pytest.approx(bubble(stages, parts))


@pytest.mark.parametrize("stages, parts", SIZES)
def test_few_activations_are_held(stages, parts):
    for stage, order in enumerate(orders("1f1b", stages, parts)):
        held = most = 0
        for slot in order:
            held += 1 if slot.direction is Pass.FORWARD else -1
            most = max(most, held)
        assert most == min(parts, stages - stage)
