"""In which order a stage of a pipeline computes its microbatches."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Pass(enum.Enum):
    """Direction of a computation."""

    FORWARD = "forward"
    BACKWARD = "backward"


class ScheduleSlot(NamedTuple):
    """One computation of a stage."""

    direction: Pass
    microbatch: int


def gpipe(microbatches: int) -> list[ScheduleSlot]:
    """Return GPipe's order: all microbatches forwards, then all backwards.

    Source: Huang et al. 2019 (arXiv:1811.06965).

    Example:
        >>> [f"{slot.direction.value[0]}{slot.microbatch}" for slot in gpipe(2)]
        ['f0', 'f1', 'b1', 'b0']
    """
    forward = [ScheduleSlot(Pass.FORWARD, m) for m in range(microbatches)]
    return forward + [ScheduleSlot(Pass.BACKWARD, m) for m in reversed(range(microbatches))]


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[ScheduleSlot]:
    """Return the order in which a stage holds activations of as few microbatches as can be.

    A stage first computes as many microbatches forwards as there are stages behind it, then one
    forwards and one backwards in turn. It holds what at most `stages - stage` microbatches need,
    and is idle no longer than under GPipe. Source: PipeDream-Flush, Narayanan et al. 2021
    (arXiv:2006.09503).

    Example:
        >>> order = one_forward_one_backward(0, 2, 3)
        >>> [f"{slot.direction.value[0]}{slot.microbatch}" for slot in order]
        ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    ahead = min(stages - stage - 1, microbatches)
    order = [ScheduleSlot(Pass.FORWARD, m) for m in range(ahead)]
    for m in range(microbatches - ahead):
        order += [ScheduleSlot(Pass.FORWARD, ahead + m), ScheduleSlot(Pass.BACKWARD, m)]
    return order + [
        ScheduleSlot(Pass.BACKWARD, m) for m in range(microbatches - ahead, microbatches)
    ]


def bubble(stages: int, microbatches: int) -> float:
    """Return the part of a step that a stage is idle, if all stages take equally long.

    Example:
        >>> bubble(2, 1), bubble(4, 12)
        (0.5, 0.2)
    """
    return (stages - 1) / (microbatches + stages - 1)
