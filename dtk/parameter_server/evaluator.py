"""Evaluator of a parameter-server job: evaluates checkpoints as they appear.

The evaluator runs the same script as the other tasks. Its `fit` trains nothing: it waits for the
checkpoints of the chief's `dtk.callbacks.Checkpoint`, loads each into the model, evaluates it on
`fit`'s validation data and writes the numbers down. When the chief is gone and the last checkpoint
is evaluated, the process ends, like the processes of workers and servers.

    chief       step step step save     step step step save     step ...
    evaluator                      evaluate               evaluate
"""

from __future__ import annotations

import csv
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import keras
import tensorflow as tf

from dtk.cluster import progress
from dtk.errors import ClusterError
from dtk.parameter_server.job_context import JobStrategy
from dtk.trainer.distributed_trainer import DistributedTrainer

_LOOK_SECONDS = 1.0
_FILE = "evaluation.csv"


class SavedProgress(NamedTuple):
    """Progress of training that a checkpoint records."""

    epoch: int  # complete epochs
    step: int  # steps of the next epoch
    iterations: int | None  # steps in all; None if the optimizer has not saved it


def source_of(
    callbacks: keras.callbacks.CallbackList | list[keras.callbacks.Callback] | None,
) -> keras.callbacks.Callback | None:
    """Return the callback of `fit` that saves the checkpoints for an evaluator; else None."""
    listed = getattr(callbacks, "callbacks", callbacks) or []
    return next((c for c in keras.tree.flatten(listed) if hasattr(c, "appeared")), None)


class EvaluatorTrainer(DistributedTrainer):
    """Trainer of a model in the evaluator's process: its `fit` evaluates."""

    strategy: JobStrategy

    def before_fit(self, asked: dict[str, object]) -> NoReturn:
        """Evaluate the chief's checkpoints until the chief is gone, then exit with 0."""
        model = self.model
        source = source_of(asked["callbacks"])
        if source is None:
            raise ClusterError(
                "evaluator 0: fit has no dtk.callbacks.Checkpoint among its callbacks, so there is "
                "nothing to evaluate; add one, in a directory that all hosts share, or start "
                "without --evaluator"
            )
        if asked["validation_data"] is None:
            raise ClusterError(
                "evaluator 0: fit has no validation_data, so there is nothing to evaluate on; "
                "give some (validation_split is not seen here), or start without --evaluator"
            )
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(asked["validation_data"])
        evaluate = functools.partial(
            model.evaluate,
            x,
            y,
            sample_weight=sample_weight,
            batch_size=asked["validation_batch_size"] or asked["batch_size"],
            steps=self.strategy.evaluator.steps or asked["validation_steps"],
            verbose=0,
            return_dict=True,
        )
        listed = keras.tree.flatten(asked["callbacks"])
        boards = [one for one in listed if isinstance(one, keras.callbacks.TensorBoard)]
        events = Path(boards[0].log_dir) / "evaluation" if boards else None
        log = EvaluationLog(source.directory / _FILE, events)
        if not model.built:
            model.evaluate(x, y, batch_size=1, steps=1, verbose=0)
        watch_until_end(model, source, evaluate, log, self.strategy)
        raise SystemExit(0)


def watch_until_end(
    model: keras.Model,
    source: keras.callbacks.Callback,
    evaluate: Callable[[], dict[str, float]],
    log: EvaluationLog,
    strategy: JobStrategy,
) -> None:
    """Evaluate the checkpoints that appear, until the chief is gone."""
    config, chief = strategy.evaluator, strategy.chief
    there = source.appeared(())
    if log.names and (not there or max(there) < max(log.names)):
        raise ClusterError(
            f"evaluator 0: {log.path} has numbers of {max(log.names)}, and the newest "
            f"checkpoint there is {there[-1] if there else 'none'}: it belongs to another run; "
            "remove it, or use another directory"
        )
    seen = set(log.names)
    due = time.monotonic() + config.start_delay
    while True:
        # Ask first, so that a last checkpoint, saved before the chief went, is still found below.
        gone = chief.is_gone()
        new = source.appeared(seen) if gone or time.monotonic() >= due else []
        seen.update(new)
        for name in new[-1:] if config.throttle else new:
            due = time.monotonic() + config.throttle
            saved = source.load_weights(model, name)
            if saved is None:
                print(f"evaluator: {name} was removed before its turn; going on", flush=True)
                continue
            with progress.inside("evaluation"):
                numbers = evaluate()
                for exporter in config.exporters:
                    exporter(model, source.directory, name, numbers, log.rows)
                log.write(name, saved, numbers)
        if gone:
            break
        time.sleep(_LOOK_SECONDS)
    if not seen:
        raise ClusterError(
            f"evaluator 0: no checkpoint appeared in {source.directory.absolute()} while the chief "
            "was there; the directory must be one that this host and the chief's share"
        )


class EvaluationLog:
    """Log of evaluations: a CSV file beside the checkpoints, TensorBoard, and one line each.

    Attributes:
        names: The checkpoints evaluated so far.
        rows: Their numbers.
    """

    def __init__(self, path: Path, events: Path | None):
        self.path = path
        self.names: set[str] = set()
        self.rows: list[dict[str, float]] = []
        self._columns: Sequence[str] = ()
        if path.is_file():
            with open(path, newline="") as file:
                reader = csv.DictReader(file)
                for row in reader:
                    self.names.add(row.pop("checkpoint"))
                    numbers = {k: v for k, v in row.items() if k not in SavedProgress._fields}
                    self.rows.append({key: float(value) for key, value in numbers.items()})
                self._columns = reader.fieldnames or ()
        self._writer = None if events is None else tf.summary.create_file_writer(str(events))

    def write(self, name: str, saved: SavedProgress, numbers: dict[str, float]) -> None:
        """Write down the evaluation of one checkpoint."""
        numbers = {key: float(value) for key, value in numbers.items()}
        self._append({"checkpoint": name, **saved._asdict(), **numbers})
        self.names.add(name)
        self.rows.append(numbers)
        if self._writer is not None:
            step = saved.epoch if saved.iterations is None else saved.iterations
            with self._writer.as_default():
                for key, value in numbers.items():
                    tf.summary.scalar(f"evaluation_{key}", value, step)
            self._writer.flush()
        told = " - ".join(f"{key}: {value:.4f}" for key, value in numbers.items())
        where = f"epoch {saved.epoch}" + (f", step {saved.step}" if saved.step else "")
        print(f"evaluator: {name} ({where}): {told}", flush=True)

    def _append(self, row: dict[str, object]) -> None:
        columns, is_new = list(row), not self._columns
        if not is_new and list(self._columns) != columns:
            raise ClusterError(
                f"evaluator 0: {self.path} has the columns {', '.join(self._columns)}, and this "
                f"model has {', '.join(columns)}; remove the file, or use another directory"
            )
        self._columns = columns
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, columns)
            if is_new:
                writer.writeheader()
            writer.writerow(row)
