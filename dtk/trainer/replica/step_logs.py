"""The logs of a step: metric results and other numbers."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import tensorflow as tf

from dtk.nests import Nest
from dtk.trainer.tracing import traced_step


def numbers_of(step: traced_step.Step, logs: Nest) -> list[tuple[str, tf.Tensor]]:
    """Find the numbers in a step's logs that are not metric results."""
    flat = keras.tree.flatten_with_path(logs) if isinstance(logs, dict) else []
    return [
        (name_of(path), step.terms.made_mean(f"log {name_of(path)!r}", value))
        for path, value in flat
        if tf.is_tensor(value)
        and value.dtype.is_floating
        and value.shape.rank == 0
        and value.ref() not in step.results
    ]


def results_in(
    step: traced_step.Step, logs: Nest
) -> list[tuple[traced_step.Path, keras.Metric, traced_step.Path]]:
    """Find the metric results in a step's logs."""
    flat = keras.tree.flatten_with_path(logs) if isinstance(logs, dict) else []
    return [
        (path, *step.results[value.ref()])
        for path, value in flat
        if isinstance(value, tf.Tensor) and value.ref() in step.results
    ]


def name_of(path: traced_step.Path) -> str:
    """Return the name of an entry of a step's logs."""
    return "/".join(map(str, path))


def replaced(logs: Nest, found: Mapping[str, tf.Tensor]) -> Nest:
    """Replace numbers in a step's logs, by name."""
    paths = [name_of(path) for path, _ in keras.tree.flatten_with_path(logs)]
    values = [found.get(p, v) for p, v in zip(paths, keras.tree.flatten(logs), strict=True)]
    return keras.tree.pack_sequence_as(logs, values)
