"""What a pipeline is made of: its stages, who takes from whom, and parts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.errors import at_rank
from dtk.even_division import even_bounds
from dtk.nests import Nest

# A stage, or a function without arguments that builds it.
Stage: TypeAlias = "keras.Model | Callable[[], keras.Model]"


def microbatch(inputs: Nest, part: int, parts: int) -> Nest:
    """Cut the rows of one microbatch, as even as can be."""

    def rows(value: tf.Tensor) -> tf.Tensor:
        count = tf.shape(value)[0] if value.shape[0] is None else value.shape[0]
        begin, end = even_bounds(count, part, parts)
        return value[begin:end]

    return tf.nest.map_structure(lambda value: rows(tf.convert_to_tensor(value)), inputs)


def check(stages: Sequence[Stage], microbatches: int, schedule: str, group: Communicator) -> None:
    """Raise a ValueError for a pipeline that these ranks cannot make."""
    if schedule not in ("gpipe", "1f1b"):
        raise ValueError(at_rank(group.rank, f"schedule={schedule!r}; expected 'gpipe' or '1f1b'"))
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(
            at_rank(group.rank, f"microbatches={microbatches!r}; expected a number, 1 or more")
        )
    if not stages or group.size not in (1, len(stages)):
        raise ValueError(
            at_rank(
                group.rank,
                f"a pipeline of {len(stages)} stages on {group.size} ranks; each stage takes one: "
                f"make the strategy with model_parallel={max(1, len(stages))}, or cut the model "
                f"into {group.size} stages",
            )
        )


def check_fits(
    number: int,
    stage: keras.Model,
    sources: Sequence[int],
    outputs: Sequence[keras.KerasTensor],
    rank: int,
) -> None:
    """Raise a ValueError for a stage that does not take what its sources put out."""
    if not sources:
        return
    taken = [tuple(one.shape[1:]) for one in stage.inputs]
    given = [tuple(outputs[source].shape[1:]) for source in sources]
    if len(taken) != len(given) or not all(map(_same_shape, taken, given)):
        raise ValueError(
            at_rank(
                rank,
                f"stage {number} ({stage.name!r}) takes inputs of the shapes {taken} of a row, and "
                f"the stages {list(sources)} that lead to it put out {given}; change an Input, or "
                "links=",
            )
        )


def _same_shape(one: Sequence[int | None], other: Sequence[int | None]) -> bool:
    return len(one) == len(other) and all(
        a == b or a is None or b is None for a, b in zip(one, other, strict=True)
    )


def sources_of(count: int, links: Mapping[int, Sequence[int]], rank: int) -> list[list[int]]:
    """Return the stages that each stage takes its inputs from."""
    for stage, sources in links.items():
        if stage not in range(count) or not all(0 <= source < stage for source in sources):
            raise ValueError(
                at_rank(
                    rank,
                    f"links={{{stage}: {list(sources)}}} of {count} stages; a stage takes the "
                    "outputs of stages before it, counted from 0",
                )
            )
    return [
        sorted(links[stage]) if stage in links else [stage - 1] if stage else []
        for stage in range(count)
    ]
