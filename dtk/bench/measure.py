"""Measuring: variants take turns, so that whatever else the machine does falls on all alike.

    round 1   limit  none  1bit  ddp        a variant belongs to a world, and every process of
    round 2   ddp  1bit  none  limit        that world measures at the same time
    ...

No TensorFlow here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from dtk.bench.results import Results, reading_of
from dtk.bench.setting import Setting
from dtk.bench.worker import Answer
from dtk.errors import DtkError

_T = TypeVar("_T")


class WorldLost(DtkError, RuntimeError):
    """A world has ended, or could not start; says why."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


class World(Protocol):
    """Processes that measure together, seen from the command line."""

    name: str  # unique
    essential: bool  # whether there is nothing to measure without it

    def ask(self, request: Mapping[str, object]) -> list[Answer]:
        """Ask all processes the same (see `dtk.bench.worker`), and wait for their answers."""

    def rest(self) -> None:
        """Leave the cores to other worlds until it is asked again."""


@dataclasses.dataclass
class Benchmark:
    """Measures all tasks in all worlds."""

    setting: Setting
    worlds: list[World]
    results: Results
    say: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Measure everything."""
        for task in self.setting.tasks:
            variants = self._build(task)
            for number in range(self.setting.rounds + 1):
                for world, name in order(variants, number):
                    if world in self.worlds:
                        self._measure(task, world, name, keep=number > 0)

    def _build(self, task: str) -> list[tuple[World, str]]:
        self.results.parameters[task], self.results.turns[task] = 0, {}
        variants = []
        for world in list(self.worlds):
            for built in self._ask(world, {"build": task})[:1]:
                variants += [(world, name) for name in self._built(task, world, built)]
        self.results.turns[task] = {label(*variant): [] for variant in variants}
        return variants

    def _built(self, task: str, world: World, built: Answer) -> list[str]:
        """Take note of what a world can measure, and of what it cannot."""
        for name, why in built["absent"].items():
            self.results.absent[f"{label(world, name)}, {task}"] = why
        if not built["variants"]:
            return []
        # The first is the limit, which all others are compared with.
        expected = self.results.parameters[task] or built["parameters"]
        self.results.parameters[task] = expected
        if built["parameters"] != expected:
            why = f"its model has {built['parameters']} parameters, expected {expected}"
            self.results.absent[f"{world.name}, {task}"] = why
            return []
        return list(built["variants"])

    def _measure(self, task: str, world: World, name: str, keep: bool) -> None:
        answers = self._ask(world, {"measure": name})
        if not answers:
            # What is left of a round that has no end compares with nothing.
            kept = self.results.turns[task]
            for key in [key for key in kept if f"{key} ".startswith(f"{world.name} ")]:
                del kept[key]
        elif keep:
            readings = [reading_of(answer) for answer in answers]
            self.results.turns[task][label(world, name)].append(readings)
        self.say()

    def _ask(self, world: World, request: Mapping[str, object]) -> list[Answer]:
        """Ask a world; return no answers where it is lost, and can be done without."""
        try:
            answers = world.ask(request)
            world.rest()
        except WorldLost as lost:
            if world.essential:
                raise
            self.worlds.remove(world)
            self.results.absent[world.name] = str(lost)
            return []
        return answers


def order(variants: Sequence[_T], number: int) -> Iterator[_T]:
    """Return the order of one round: every other round begins at the other end.

    Example:
        >>> list(order("abc", 1)), list(order("abc", 2))
        (['a', 'b', 'c'], ['c', 'b', 'a'])
    """
    return iter(variants) if number % 2 else reversed(variants)


def label(world: World, name: str) -> str:
    """Return a variant's name in tables: that of its world, and its own.

    A world that measures one thing, which its name ends with, needs no second word.
    """
    return world.name if world.name.split()[-1] == name else f"{world.name} {name}"
