"""A plan that `dtk plan --model` writes to a file and a training script reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from dtk.planning.inputs import PlanError

if TYPE_CHECKING:
    import keras

_FORMAT = 1
_MARK = "dtk plan --model"
_SCRIPT = """\
plan = dtk.planning.load_plan("{file}")
strategy = dtk.strategies.AllReduceStrategy(model_parallel=plan.model_parallel)
with strategy.scope():
    model = {made}
    model.compile(...)
model.fit(..., batch_size=plan.batch_size)    # dtk run -n {workers} train.py"""


@dataclass(frozen=True)
class ModelPlan:
    """How a model is divided among ranks.

    Attributes:
        data: Number of replicas; each trains on its part of the batch.
        model_parallel: Number of ranks that hold one model, for `AllReduceStrategy`.
        batch_size: Rows of all replicas.
        layers: The plan for `dtk.layers.parallelize`: name of a layer -> "output", "input", "rows"
            or "columns". Layers that are not named stay whole.
        borders: For a pipeline, the last layer of each stage but the last.
        microbatches: For a pipeline, see `dtk.layers.Pipeline`.
        schedule: For a pipeline, see `dtk.layers.Pipeline`.
        seconds: Predicted seconds of a step.
        memory: Bytes on a rank for weights and for outputs kept for the backward pass.
        sent: Bytes that a rank sends in a step.
    """

    data: int
    model_parallel: int
    batch_size: int
    layers: Mapping[str, str] = field(default_factory=dict)
    borders: tuple[str, ...] = ()
    microbatches: int = 1
    schedule: str = "gpipe"
    seconds: float = 0.0
    memory: float = 0.0
    sent: float = 0.0

    @property
    def workers(self) -> int:
        """Processes to start."""
        return self.data * self.model_parallel

    def stages(self, model: keras.Model) -> list[keras.Model]:
        """Cut a model into the stages of this plan's pipeline.

        Args:
            model: The planned model; the stages share its layers.

        Returns:
            The stages for `dtk.layers.Pipeline`; a single stage if there are no borders.

        Raises:
            PlanError: The model does not have a layer named in `borders`.
        """
        import keras

        known = {one.name: one for one in keras.Model(model.inputs, model.outputs).operations}
        missing = [name for name in self.borders if name not in known]
        if missing:
            raise PlanError(
                f"model {model.name!r} has no layers {missing}; plan it anew: `dtk plan --model`"
            )
        given = [model.input, *(known[name].output for name in self.borders)]
        return [
            keras.Model(begin, end)
            for begin, end in zip(given, [*given[1:], model.output], strict=True)
        ]

    def script(self, file: str = "plan.json") -> str:
        """Return the lines of a script that trains by this plan.

        Args:
            file: Path of the plan.

        Example:
            >>> print(ModelPlan(2, 2, 64, {"conv": "rows"}).script())
            plan = dtk.planning.load_plan("plan.json")
            strategy = dtk.strategies.AllReduceStrategy(model_parallel=plan.model_parallel)
            with strategy.scope():
                model = dtk.layers.parallelize(build(), plan.layers)
                model.compile(...)
            model.fit(..., batch_size=plan.batch_size)    # dtk run -n 4 train.py
        """
        made = "build()"
        if self.layers:
            made = "dtk.layers.parallelize(build(), plan.layers)"
        elif self.borders:
            made = "dtk.layers.Pipeline(plan.stages(build()), plan.microbatches, plan.schedule)"
        return _SCRIPT.format(file=file, made=made, workers=self.workers)

    def dumps(self) -> str:
        """Return the plan as JSON."""
        return json.dumps({_MARK: _FORMAT, **asdict(self)}, indent=1) + "\n"


def load_plan(file: str | Path) -> ModelPlan:
    """Read a plan that `dtk plan --model ... --json` wrote.

    Args:
        file: Path of the plan.

    Returns:
        The plan: `AllReduceStrategy(model_parallel=plan.model_parallel)` makes its grid,
        `dtk.layers.parallelize(model, plan.layers)` divides the model.

    Raises:
        PlanError: The file does not exist, or is not such a plan.
    """
    try:
        found = json.loads(Path(file).read_text())
    except OSError as error:
        raise PlanError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        found = None  # no JSON
    expected = {one.name for one in fields(ModelPlan)}
    if not isinstance(found, dict) or found.pop(_MARK, None) != _FORMAT or set(found) != expected:
        raise PlanError(
            f"{file}: not what `dtk plan --model model.keras -n 4 --json {file}` of this version "
            "writes; make it anew"
        )
    return ModelPlan(**{**found, "borders": tuple(found["borders"])})
