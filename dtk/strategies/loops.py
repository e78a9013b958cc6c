"""Batches go out to workers behind parameter servers, and results come back.

A loop is what Keras calls as its train, test or predict function: it hands a batch's slices to
workers and uses what they made of them. Everything but the workers' computing happens on the main
thread, between Keras's callbacks: a callback that reads weights never sees half a step. Here are
the parts, and the loops that change nothing; `training.py` has the one that does.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from dtk.strategies import adopt, agreement, extended, pushpull, slicing, steps, worker_data
from dtk.strategies.apart import Apart, trace_apart
from dtk.strategies.consistency import Async, Schedule

# Steps that compute at once draw their random numbers this far apart.
_CHANCE_STRIDE = 1 << 10


class Result:
    """What a worker made of one slice.

    Args:
        outputs: What came back to the chief, as arrays.
        share: The slice's part of the rows of its batch.
        mailbox: Where its gradients are, if it has some.
        release: Takes the mailbox back.
        older: Applied steps that were not in the weights, besides those under way.
    """

    def __init__(
        self,
        outputs: Any,
        share: float,
        mailbox: pushpull.Mailbox | None = None,
        release: Callable[[Any], None] = lambda mailbox: None,
        older: int = 0,
    ):
        self.outputs, self.share, self.mailbox, self._release = outputs, share, mailbox, release
        self.older = older

    def drop(self) -> None:
        """It is not needed any more."""
        self._release(self.mailbox)


class Batch(NamedTuple):
    """A global batch in slices.

    Attributes:
        parts: The slices.
        counts: Rows of each that are its own; 0 for a stand-in.
        rows: Rows of all.
        spec: Specification of a slice of any number of rows.
        pipelines: Where workers take the rows from, if the chief has none.
        bound: Whether slices go round the workers; for pipelines only.
    """

    parts: tuple
    counts: tuple
    rows: int
    spec: Any
    pipelines: worker_data.Pipelines | None = None
    bound: bool = False

    @property
    def holders(self) -> float:
        """Slices that have rows."""
        return float(sum(count > 0 for count in self.counts))


def whole_batch(data: Any) -> Any:
    """A batch, or the next of a worker's own pipeline; traced."""
    if isinstance(data, tf.data.Iterator):
        data = data.get_next()
    return steps.without_optionals(data)


def _apart_by(steps: int) -> np.uint32:
    """How far apart steps draw their random numbers."""
    return np.uint32(steps * _CHANCE_STRIDE % 2**32)


class Steps:
    """Slices of batches, handed out in the order the schedule allows; see `crew.Work`.

    Args:
        schedule: Which slice may start.
        workers: Their number.
        lost_workers: Who is gone at the moment.
    """

    def __init__(self, schedule: Schedule, workers: int, lost_workers: Collection[int]):
        self.schedule, self._workers, self._lost_workers = schedule, workers, lost_workers
        self._batches: dict[int, Batch] = {}
        self._results: dict[int, dict[int, Result | None]] = {}
        self._complete: collections.deque[int] = collections.deque()

    def add(self, batch: Batch) -> None:
        """Add a batch: one step."""
        step = self.schedule.offer()
        self._batches[step], self._results[step] = batch, {}

    def take(self, worker: int) -> Any:
        """The next slice for a worker. One without rows needs none."""
        while self._is_turn_of(worker) and (piece := self.schedule.take(worker)) is not None:
            work = (piece, self._batches[piece.step])
            if work[1].counts[piece.slice] > 0:
                return work
            self.finished(work, worker, None)
        return None

    def _is_turn_of(self, worker: int) -> bool:
        """Whether the next slice may be this worker's.

        Workers that read pipelines of their own take turns, so that each is read as far as any
        other. Another stands in while one is lost.
        """
        step, part = self.schedule.next_slice
        batch = self._batches.get(step)
        if batch is None or batch.pipelines is None or not batch.bound:
            return True
        owner = (step * self.schedule.slices + part) % self._workers
        return owner == worker or owner in self._lost_workers

    def finished(self, work: Any, worker: int, result: Result | None) -> None:
        """A worker has computed a slice."""
        piece, _ = work
        if self.schedule.returned(piece, worker, 0 if result is None else result.older):
            self._results[piece.step][piece.slice] = result
            if self.schedule.complete(piece.step):
                self._complete.append(piece.step)
        elif result is not None:
            result.drop()

    def lost(self, work: Any, worker: int) -> None:
        """A worker died with a slice."""
        self.schedule.lost(work[0], worker)

    def next_complete(self) -> tuple[int, list[Result]] | None:
        """A step whose slices are all computed, and their results in order; None if there is none.

        The slices without rows are left out.
        """
        if not self._complete:
            return None
        step = self._complete.popleft()
        results = self._results.pop(step)
        # A copy of one of its slices may still be computing, and has the batch in its hands.
        del self._batches[step]
        return step, [r for _, r in sorted(results.items()) if r is not None]


class Loop:
    """Batches go out to the workers, results come back; the base of training, testing, predicting.

    Args:
        adoption: The model's adoption.
        schedule: Makes what decides which slice may start.
    """

    def __init__(self, adoption: Any, schedule: Callable[[], Schedule]):
        self.model, self.strategy = adoption.model, adoption.strategy
        self.adoption = adoption
        self._new_schedule = schedule
        self._steps = self._new_steps()
        self._functions: dict[Any, Callable] = {}
        self._reports: dict[Any, pushpull.Report] = {}
        self._open = contextlib.ExitStack()
        self._is_open = False
        # States of random layers, shape (layers, 2), and the step they are the states of.
        self._chance: np.ndarray | None = None
        self._first = 0
        self._draws = False

    @property
    def schedule(self) -> Schedule:
        """What decides which slice may start."""
        return self._steps.schedule

    @property
    def ahead(self) -> int:
        """Batches that may be under way when `step` returns."""
        return 0

    def step(self, batch: slicing.Slices | worker_data.Pipelines, spec: Any) -> None:
        """Hand out one batch; return once no more than `ahead` are under way."""
        self._prepare(spec)
        self._hand_out(self._batch(batch, spec))

    def _hand_out(self, batch: Batch) -> None:
        if not self._is_open:
            self._open.enter_context(self.strategy.crew.working(self._steps, self._compute))
            self._is_open = True
        self.strategy.crew.offer(lambda: self._steps.add(batch))
        self._settle(self.ahead)

    def _batch(self, batch: slicing.Slices | worker_data.Pipelines, spec: Any) -> Batch:
        if isinstance(batch, worker_data.Pipelines):
            slices = self.strategy.slices
            # Every slice counts alike: they have the same number of rows, see `worker_dataset`.
            return Batch((), (1,) * slices, slices, spec, batch, slices == self.strategy.workers)
        return Batch(batch.parts, tuple(map(int, batch.counts)), int(batch.rows), spec)

    def drain(self) -> None:
        """Wait until everything handed out is finished; keep what random layers go on from."""
        if self._is_open:
            self._settle(0)
        if self._chance is not None and self._draws:
            if self.schedule.tau:
                self._chance[:, 1] += _apart_by(self.schedule.offered - self._first)
            for variable, state in zip(self.adoption.chance_states(), self._chance, strict=True):
                variable.assign(state)
        self._chance = None

    def close(self) -> None:
        """Send the workers home, and forget what is not finished: an exception left the loop."""
        self._open.close()
        self._is_open = False
        self._chance = None
        if self.schedule.unfinished:
            self._steps = self._new_steps()

    def _new_steps(self) -> Steps:
        strategy = self.strategy
        return Steps(self._new_schedule(), strategy.workers, strategy.crew.lost_workers)

    def _settle(self, allowed: int) -> None:
        crew = self.strategy.crew
        while True:
            found = crew.wait(
                lambda: self._steps.next_complete() or self.schedule.unfinished <= allowed
            )
            if found is True:
                return
            step, results = found
            with crew.asking_servers():
                self._finish(step, results)
            crew.offer(functools.partial(self.schedule.applied, step))
            for result in results:
                result.drop()

    def _take_chance(self) -> tf.TensorSpec:
        """Find out what random layers go on from."""
        if self._chance is None:
            states = [v.numpy() for v in self.adoption.chance_states()]
            self._chance = np.array(states, "uint32").reshape(-1, 2)
            self._first = self.schedule.offered
        return tf.TensorSpec(self._chance.shape, tf.uint32)

    def _chances(self, chance: tf.Tensor) -> list[tuple[Any, tf.Tensor]]:
        """The states of random layers in a traced step."""
        states = self.adoption.chance_states()
        return list(zip(states, tf.unstack(chance, num=len(states)), strict=True))

    def _note_draws(self, traced: Apart, given: list[tuple[Any, tf.Tensor]]) -> None:
        now = traced.scope.get_current_value
        self._draws |= any(now(variable) is not state for variable, state in given)

    def _chance_of(self, piece: Any) -> np.ndarray:
        """Random states of a slice: the same whoever computes it, and whenever."""
        assert self._chance is not None
        states = self._chance.copy()
        if self.schedule.tau:
            states[:, 1] += _apart_by(piece.step - self._first)
        return np.array(
            [agreement.fold_seed(state, piece.slice) for state in states], "uint32"
        ).reshape(-1, 2)

    def _prepare(self, spec: Any) -> None:
        """Trace, here and not on a worker's thread, what batches like this one need."""
        raise NotImplementedError

    def _compute(self, work: Any, worker: int) -> Result:
        """Compute a slice; called on a worker's thread."""
        raise NotImplementedError

    def _finish(self, step: int, results: list[Result]) -> None:
        """Use the results of a batch, on the main thread."""
        raise NotImplementedError


class Counting(Loop):
    """A loop whose workers count metrics, which the chief adds up."""

    def __init__(self, adoption: Any, schedule: Callable[[], Schedule]):
        super().__init__(adoption, schedule)
        self.logs: dict[str, Any] = {}
        self._logged: list = []
        self._absorb: Callable | None = None

    def _state(self, tables: Sequence) -> tuple[list, int]:
        """The values variables have in a worker's step, and the bytes read for that."""
        model = self.model
        metrics = steps.metric_variables(model)
        elsewhere = {id(v) for v in [*metrics, *tables, *self.adoption.chance_states()]}
        pulled, read = pushpull.pull(v for v in model.variables if id(v) not in elsewhere)
        counted = [(v, tf.zeros(v.shape, adopt.stored(v).dtype)) for v in metrics]
        return [*pulled, *counted], read

    def _count(self, apart: Apart, data: Any) -> dict:
        """What a step adds to the metrics, the numbers it returned besides, and its rows."""
        self._logged = steps.results_in(apart.step, apart.logs)
        return {
            "metrics": [
                apart.scope.get_current_value(v) for v in steps.metric_variables(self.model)
            ],
            "logs": {
                name: apart.step.weighed(value)
                for name, value in steps.numbers_of(apart.step, apart.logs)
            },
            "rows": slicing.count_rows(data),
        }

    def _report_of(self, results: dict) -> tf.Tensor:
        self._report = pushpull.Report(results)
        return self._report.tensor

    def _call(self, batch: Batch, piece: Any, worker: int, *more: Any) -> tuple[dict, float]:
        """Run the traced step on a slice, on the worker whose thread this is.

        Returns:
            What it reported, and the slice's part of the batch's rows.
        """
        share = batch.counts[piece.slice] / batch.rows
        key = pushpull.key_of(batch.spec)
        # Made on the chief, they go along with the call; made on the worker, each is a message.
        with tf.device(extended.CHIEF):
            numbers = [tf.constant(n, tf.float32) for n in (share, batch.holders)]
            numbers += [tf.constant(n) if isinstance(n, np.ndarray) else n for n in more]

        def step(data: Any) -> np.ndarray:
            return self._functions[key](data, *numbers).numpy()

        if batch.pipelines is None:
            found = step(batch.parts[piece.slice])
        else:
            found = batch.pipelines.call(step, worker)
        return self._reports[key].read(found), share

    def _add_up(self, results: list[Result]) -> None:
        """Add what a batch's slices counted to the chief's metrics; renew the logs."""
        model = self.model
        deltas = []
        for variable, *column in zip(
            steps.metric_variables(model), *(r.outputs["metrics"] for r in results), strict=True
        ):
            deltas.append(tf.cast(np.sum(column, axis=0), adopt.stored(variable).dtype))
        if self._absorb is None:
            self._absorb = tf.function(self._absorbing(), autograph=False)
        self.logs.update(self._absorb(deltas))
        for name in results[0].outputs["logs"]:
            self.logs[name] = sum(r.outputs["logs"][name] for r in results)

    def _absorbing(self) -> Callable:
        model = self.model

        def absorb(deltas: list) -> dict:
            for variable, delta in zip(steps.metric_variables(model), deltas, strict=True):
                adopt.stored(variable).assign_add(delta)
            logs: dict = {}
            for path, metric, part in self._logged:
                _put(logs, path, functools.reduce(operator.getitem, part, metric.result()))
            return logs

        return absorb


def _put(logs: dict, path: tuple, value: Any) -> None:
    """Give a dictionary of dictionaries a value."""
    for name in path[:-1]:
        logs = logs.setdefault(name, {})
    logs[path[-1]] = tf.convert_to_tensor(value)


class Testing(Counting):
    """`evaluate`'s batches: any order, nothing applied."""

    def __init__(self, adoption: Any):
        strategy = adoption.strategy
        schedule = functools.partial(Schedule, Async().tau, strategy.slices)
        super().__init__(adoption, schedule)

    @property
    def ahead(self) -> int:
        """Workers shall find work waiting."""
        return 2 * self.strategy.workers

    def _batch(self, batch: slicing.Slices | worker_data.Pipelines, spec: Any) -> Batch:
        # Else a fast worker's rows would count more often than a slow one's.
        return super()._batch(batch, spec)._replace(bound=True)

    def _prepare(self, spec: Any) -> None:
        chance = self._take_chance()
        key = pushpull.key_of(spec)
        if key not in self._functions:
            self._tables = adopt.tables_of(self.model)
            scalar = tf.TensorSpec([], tf.float32)
            function = tf.function(self._step, autograph=False)
            self._functions[key] = function.get_concrete_function(spec, scalar, scalar, chance)
            self._reports[key] = self._report

    def _step(self, data: Any, share: Any, size: Any, chance: Any) -> tf.Tensor:
        with extended.in_replica(self.strategy):
            state, _ = self._state(self._tables)
            data = whole_batch(data)
            chances = self._chances(chance)
            apart = trace_apart(
                self.model.test_step,
                data,
                self.model,
                share=share,
                size=size,
                world_sum=self.strategy.sum_over_slices,
                state=[*state, *chances],
                tables=self._tables,
                kinds=self.adoption.kinds_of("test"),
            )
            self._note_draws(apart, chances)
            return self._report_of(self._count(apart, data))

    def _compute(self, work: Any, worker: int) -> Result:
        piece, batch = work
        return Result(*self._call(batch, piece, worker, self._chance_of(piece)))

    def _finish(self, step: int, results: list[Result]) -> None:
        self._add_up(results)


class Predicting(Loop):
    """`predict`'s batches: each cut into a slice per worker, rows put together in order."""

    def __init__(self, adoption: Any):
        strategy = adoption.strategy
        schedule = functools.partial(Schedule, math.inf, strategy.workers)
        super().__init__(adoption, schedule)
        self.outputs: list = []

    def _prepare(self, spec: Any) -> None:
        chance = self._take_chance()
        key = pushpull.key_of(spec)
        if key not in self._functions:
            self._tables = adopt.tables_of(self.model)
            function = tf.function(self._step, autograph=False)
            self._functions[key] = function.get_concrete_function(spec, chance)

    def _step(self, data: Any, chance: Any) -> Any:
        model = self.model
        with extended.in_replica(self.strategy):
            elsewhere = {id(v) for v in [*self._tables, *self.adoption.chance_states()]}
            elsewhere |= {id(v) for v in steps.metric_variables(model)}
            state, _ = pushpull.pull(v for v in model.variables if id(v) not in elsewhere)
            chances = self._chances(chance)
            traced = trace_apart(
                model.predict_step,
                steps.without_optionals(data),
                model,
                share=tf.constant(1.0),
                size=tf.constant(1.0),
                world_sum=lambda value: value,
                state=[*state, *chances],
                tables=self._tables,
            )
            self._note_draws(traced, chances)
            return traced.logs

    def _compute(self, work: Any, worker: int) -> Result:
        piece, batch = work
        function = self._functions[pushpull.key_of(batch.spec)]
        with tf.device(extended.CHIEF):
            chance = tf.constant(self._chance_of(piece))
        outputs = function(batch.parts[piece.slice], chance)
        with tf.device(extended.CHIEF):  # fetched here, where a lost worker is noticed
            outputs = tf.nest.map_structure(tf.identity, outputs, expand_composites=True)
        return Result(outputs, 1.0)

    def _finish(self, step: int, results: list[Result]) -> None:
        with tf.device(extended.CHIEF):
            self.outputs.append(
                tf.nest.map_structure(
                    lambda *parts: tf.concat(parts, 0), *(r.outputs for r in results)
                )
            )
