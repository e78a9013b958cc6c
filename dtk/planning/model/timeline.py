"""A step, simulated: tasks that wait for each other, on processors and links that do one at a time.

    compute 0   | f0 | f1 |    | f2 |      | b2 | b1 | b0 | update |
    link 0                | f1's |                 | gradients |

A processor or link that is free takes, of the tasks whose predecessors have ended, the first one in
the order of the step. Source: the simulator of FlexFlow (Jia, Zaharia and Aiken 2018, section 5).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

# A processor or a link, such as ("compute", 0).
Resource: TypeAlias = tuple[str, int]


class Task(NamedTuple):
    """Something that takes time."""

    name: str  # what is done
    resource: Resource
    seconds: float  # how long it takes
    after: tuple[int, ...]  # positions of the tasks that must have ended


@dataclass(frozen=True)
class Timeline:
    """When tasks end."""

    ends: tuple[float, ...]  # seconds from the begin of the step, by task

    @property
    def seconds(self) -> float:
        """Seconds until all tasks have ended."""
        return max(self.ends, default=0.0)


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Simulate tasks.

    Example:
        >>> cpu, link = ("compute", 0), ("link", 0)
        >>> tasks = [Task("a", cpu, 2.0, ()), Task("b", cpu, 1.0, ()), Task("c", link, 4.0, (0,))]
        >>> simulate(tasks).ends
        (2.0, 3.0, 6.0)
    """
    for number, task in enumerate(tasks):
        if any(one >= number for one in task.after):
            raise ValueError(f"task {number} ({task.name}) waits for {task.after}, behind it")
    missing = [len(set(task.after)) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for one in set(task.after):
            followers[one].append(number)
    ends = [0.0] * len(tasks)
    ready: dict[Resource, list[int]] = {task.resource: [] for task in tasks}
    idle = set(ready)
    running: list[tuple[float, int]] = []
    for number, left in enumerate(missing):
        if not left:
            heapq.heappush(ready[tasks[number].resource], number)
    now = 0.0
    while True:
        for resource in sorted(idle):
            if ready[resource]:
                number = heapq.heappop(ready[resource])
                idle.remove(resource)
                heapq.heappush(running, (now + tasks[number].seconds, number))
        if not running:
            return Timeline(tuple(ends))
        now = running[0][0]
        while running and running[0][0] <= now:
            _, number = heapq.heappop(running)
            ends[number] = now
            idle.add(tasks[number].resource)
            for following in followers[number]:
                missing[following] -= 1
                if not missing[following]:
                    heapq.heappush(ready[tasks[following].resource], following)


def critical_path(tasks: Sequence[Task]) -> float:
    """Return the seconds of the longest chain of tasks that wait for each other.

    Example:
        >>> cpu = ("compute", 0)
        >>> critical_path([Task("a", cpu, 2.0, ()), Task("b", cpu, 1.0, ())])
        2.0
    """
    ends: list[float] = []
    for task in tasks:
        ends.append(task.seconds + max((ends[one] for one in task.after), default=0.0))
    return max(ends, default=0.0)


@dataclass
class Tasks:
    """The tasks of a step, as they are added one behind the other."""

    found: list[Task] = field(default_factory=list)

    def add(self, name: str, resource: Resource, seconds: float, *after: int | None) -> int:
        waits = tuple(dict.fromkeys(one for one in after if one is not None))
        self.found.append(Task(name, resource, seconds, waits))
        return len(self.found) - 1
