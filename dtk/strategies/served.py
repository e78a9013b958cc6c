"""How Keras's `fit`, `evaluate` and `predict` drive workers behind parameter servers.

Keras's own loop runs on the chief. Where it would call the train function, dtk reads the next
global batch, hands its slices to workers, applies what came back, and returns the logs so far.
Everything but the workers' computing happens on the main thread, between Keras's callbacks: a
callback that reads weights never sees half a step.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dtk.errors import NotDistributedError
from dtk.strategies import adopt, agreement, extended, pushpull, slicing, worker_data
from dtk.strategies.consistency import Async, Schedule

# Steps that compute at once draw their random numbers this far apart.
_CHANCE_STRIDE = 1 << 10


class Result:
    """What a worker made of one slice.

    Args:
        outputs: What came back to the chief, as arrays.
        share: The slice's part of the rows of its batch.
        from_pipelines: Whether the worker read the rows itself.
        mailbox: Where its gradients are, if it has some.
        release: Takes the mailbox back.
    """

    def __init__(
        self,
        outputs: Any,
        share: float,
        from_pipelines: bool = False,
        mailbox: pushpull.Mailbox | None = None,
        release: Callable[[Any], None] = lambda mailbox: None,
    ):
        self.outputs, self.share, self.from_pipelines = outputs, share, from_pipelines
        self.mailbox, self._release = mailbox, release

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
    """

    parts: tuple
    counts: tuple
    rows: int
    spec: Any
    pipelines: worker_data.Pipelines | None = None

    @property
    def holders(self) -> float:
        """Slices that have rows."""
        return float(sum(count > 0 for count in self.counts))


def _whole_batch(data: Any) -> Any:
    """A batch, or the next of a worker's own pipeline; traced."""
    if isinstance(data, tf.data.Iterator):
        data = data.get_next()
    return adopt.without_optionals(data)


def _check_alike(rows: list[int]) -> None:
    """Make sure that slices which workers read themselves count alike.

    Raises:
        ValueError: They have different numbers of rows, so that their mean is not the batch's.
    """
    if len(set(rows)) > 1:
        raise ValueError(
            f"the workers' own pipelines gave batches of {', '.join(map(str, rows))} rows for one "
            "synchronous step, so no mean over them would be that of one batch; let dataset_fn "
            "repeat before it batches, or batch with drop_remainder=True"
        )


class Steps:
    """Slices of batches, handed out in the order the schedule allows; see `crew.Work`.

    Args:
        schedule: Which slice may start.
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self._batches: dict[int, Batch] = {}
        self._results: dict[int, dict[int, Result | None]] = {}
        self._complete: collections.deque[int] = collections.deque()

    def add(self, batch: Batch) -> None:
        """Add a batch: one step."""
        step = self.schedule.offer()
        self._batches[step], self._results[step] = batch, {}

    def take(self, worker: int) -> Any:
        """The next slice for a worker. One without rows needs none."""
        while (piece := self.schedule.take(worker)) is not None:
            work = (piece, self._batches[piece.step])
            if work[1].counts[piece.slice] > 0:
                return work
            self.finished(work, worker, None)
        return None

    def finished(self, work: Any, worker: int, result: Result | None) -> None:
        """A worker has computed a slice."""
        piece, _ = work
        if self.schedule.returned(piece, worker):
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

    def __init__(self, adoption: ServedAdoption, schedule: Callable[[], Schedule]):
        self.model, self.strategy = adoption.model, adoption.strategy
        self.adoption = adoption
        self._new_schedule = schedule
        self._steps = Steps(schedule())
        self._functions: dict[Any, Callable] = {}
        self._reports: dict[Any, pushpull.Report] = {}
        self._open = contextlib.ExitStack()
        self._is_open = False

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
        if not self._is_open:
            self._open.enter_context(self.strategy.crew.working(self._steps, self._compute))
            self._is_open = True
        added = self._batch(batch, spec)
        self.strategy.crew.offer(lambda: self._steps.add(added))
        self._settle(self.ahead)

    def _batch(self, batch: slicing.Slices | worker_data.Pipelines, spec: Any) -> Batch:
        if isinstance(batch, worker_data.Pipelines):
            slices = self.strategy.slices
            # Every slice counts alike; see `_check_alike`.
            return Batch((), (1,) * slices, slices, spec, batch)
        return Batch(batch.parts, tuple(map(int, batch.counts)), int(batch.rows), spec)

    def drain(self) -> None:
        """Wait until everything handed out is finished."""
        if self._is_open:
            self._settle(0)

    def close(self) -> None:
        """Send the workers home, and forget what is not finished: an exception left the loop."""
        self._open.close()
        self._is_open = False
        if self.schedule.unfinished:
            self._steps = Steps(self._new_schedule())

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

    def __init__(self, adoption: ServedAdoption, schedule: Callable[[], Schedule]):
        super().__init__(adoption, schedule)
        self.logs: dict[str, Any] = {}
        self._absorb: Callable | None = None

    def _state(self, tables: Sequence) -> tuple[list, int]:
        """The values variables have in a worker's step, and the bytes read for that."""
        model = self.model
        metrics = adopt.metric_variables(model)
        elsewhere = {id(v) for v in [*metrics, *tables, *self.adoption.chance_states()]}
        pulled, read = pushpull.pull(v for v in model.variables if id(v) not in elsewhere)
        counted = [(v, tf.zeros(v.shape, v._value.dtype)) for v in metrics]
        return [*pulled, *counted], read

    def _count(self, apart: adopt.Apart, data: Any) -> dict:
        """What a step adds to the metrics, the numbers it returned besides, and its rows."""
        assigned = apart.assigned
        return {
            "metrics": [
                apart.scope.get_current_value(v) for v in adopt.metric_variables(self.model)
            ],
            "logs": adopt.other_logs(self.model, apart.logs, assigned),
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
        _check_alike([int(r.outputs["rows"]) for r in results if r.from_pipelines])
        by_batch = adopt.count_batches(model)
        deltas = []
        for variable, *column in zip(
            adopt.metric_variables(model), *(r.outputs["metrics"] for r in results), strict=True
        ):
            total = np.sum(column, axis=0)
            if id(variable) in by_batch:
                total = total / len(results)
            deltas.append(tf.cast(total, variable._value.dtype))
        if self._absorb is None:
            self._absorb = tf.function(self._absorbing(), autograph=False)
        self.logs.update(self._absorb(deltas))
        for name in results[0].outputs["logs"]:
            self.logs[name] = sum(r.share * r.outputs["logs"][name] for r in results)

    def _absorbing(self) -> Callable:
        model = self.model

        def absorb(deltas: list) -> dict:
            for variable, delta in zip(adopt.metric_variables(model), deltas, strict=True):
                variable._value.assign_add(delta)
            return dict(model.get_metrics_result())

        return absorb


class Training(Counting):
    """`fit`'s steps."""

    def __init__(self, adoption: ServedAdoption):
        strategy = adoption.strategy
        self._consistency = strategy.consistency
        schedule = functools.partial(Schedule.of, self._consistency, strategy.workers)
        super().__init__(adoption, schedule)
        self._epoch = self._rows = 0
        self._mailboxes: collections.deque = collections.deque()
        self._layout: pushpull.Layout | None = None
        self._plan: list = []
        self._without_gradient: set[int] = set()
        self._moving: list = []
        self._commits: dict[int, Callable] = {}
        self._chance: np.ndarray | None = None

    @property
    def ahead(self) -> int:
        """Asynchronous workers shall find work waiting, whatever the main thread is busy with."""
        return 2 * self.strategy.workers if self.schedule.tau else 0

    def step(self, batch: slicing.Slices | worker_data.Pipelines, spec: Any) -> None:
        """As in the base, and let workers loose when the warm start is over."""
        if self.schedule.tau != self._consistency.tau:
            warm_start = self._consistency.warm_start
            if warm_start is None or warm_start.is_over(self._epoch, self._rows):
                # Serial steps draw their random numbers one after the other; these have their own.
                self.drain()
                self.strategy.crew.offer(lambda: self.schedule.loosen(self._consistency.tau))
        super().step(batch, spec)

    def new_epoch(self, epoch: int) -> None:
        """Begin what is observed anew."""
        self._epoch = epoch
        self.schedule.take_statistics()

    def drain(self) -> None:
        """Wait for every step, and keep what random layers go on from."""
        super().drain()
        if self._chance is not None:
            for variable, state in zip(self.adoption.chance_states(), self._chance, strict=True):
                variable.assign(state)
            self._chance = None

    # On the workers.

    def close(self) -> None:
        """As in the base; random layers go on from where the variables say."""
        super().close()
        self._chance = None

    def _prepare(self, spec: Any) -> None:
        layout = self._layout or self._lay_out()
        if self._chance is None:
            self._chance = np.array(
                [v.numpy() for v in self.adoption.chance_states()], "uint32"
            ).reshape(-1, 2)
            self._first = self.schedule.offered
        key = pushpull.key_of(spec)
        if key in self._functions:
            return
        handles = [tf.TensorSpec([], tf.resource) for _ in layout.slots]
        scalar = tf.TensorSpec([], tf.float32)
        chance = tf.TensorSpec(self._chance.shape, tf.uint32)
        function = tf.function(self._step, autograph=False)
        self._functions[key] = function.get_concrete_function(spec, scalar, scalar, chance, handles)
        self._reports[key] = self._report

    def _lay_out(self) -> pushpull.Layout:
        weights = [p for v in self.model.trainable_variables for p in self.adoption.parts_of(v)]
        self._tables = adopt.tables_of(self.model)
        sparse = {id(p) for v in self._tables for p in self.adoption.parts_of(v)}
        self._layout = pushpull.Layout(weights, sparse)
        return self._layout

    def _step(self, data: Any, share: Any, size: Any, chance: Any, handles: Any) -> tf.Tensor:
        """Keras's step on one slice; traced on the chief, runs on a worker, changes a mailbox."""
        model, strategy, layout = self.model, self.strategy, self._layout
        assert layout is not None
        with extended.in_replica(strategy):
            state, read = self._state(self._tables)
            data = _whole_batch(data)
            states = self.adoption.chance_states()
            state += list(zip(states, tf.unstack(chance, num=len(states)), strict=True))
            before = {id(v): value for v, value in state}
            apart = adopt.trace_apart(
                model.train_step,
                data,
                model,
                share=share,
                size=size,
                world_sum=strategy.sum_over_slices,
                state=state,
                tables=self._tables,
            )
            sent = layout.put(self._plan_for(apart.applied), handles)
            self._moving = [
                v
                for v in model.non_trainable_variables
                if id(v) in apart.assigned & set(before) and v not in states
            ]
            return self._report_of(
                {
                    **self._count(apart, data),
                    "moved": [
                        apart.scope.get_current_value(v) - before[id(v)] for v in self._moving
                    ],
                    "chance": [apart.scope.get_current_value(v) for v in states],
                    "traffic": tf.stack([read + apart.rows_read, sent]),
                }
            )

    def _plan_for(self, applied: Sequence) -> list:
        """Gradients in the layout's order; notes who is to apply them."""
        assert self._layout is not None
        if not applied and self.model.trainable_variables:
            raise NotDistributedError(
                f"the train_step of model {self.model.name!r} handed no gradient to an optimizer "
                "that is an attribute of the model, so nothing would be trained; it must call "
                "self.optimizer.apply(gradients, self.trainable_variables)"
            )
        found: dict[int, Any] = {}
        self._plan = []
        for optimizer, gradients, variables in applied:
            parts = [p for v in variables for p in self.adoption.parts_of(v)]
            split = [
                g
                for gradient, v in zip(gradients, variables, strict=True)
                for g in pushpull.split_gradient(gradient, v)
            ]
            if set(found) & {id(p) for p in parts}:
                raise NotDistributedError(
                    f"the train_step of model {self.model.name!r} updates a weight twice in a "
                    "step; behind parameter servers a step applies one gradient to each weight"
                )
            found |= {id(p): g for p, g in zip(parts, split, strict=True)}
            self._plan.append((optimizer, parts))
        gradients = [found.get(id(w)) for w in self._layout.weights]
        self._without_gradient = {
            id(w) for w, g in zip(self._layout.weights, gradients, strict=True) if g is None
        }
        return gradients

    def _compute(self, work: Any, worker: int) -> Result:
        piece, batch = work
        mailbox = self._free_mailbox()
        outputs, share = self._call(batch, piece, worker, self._chance_of(piece), mailbox.handles)
        self.strategy.note_traffic(worker, outputs["traffic"])
        return Result(outputs, share, batch.pipelines is not None, mailbox, self._mailboxes.append)

    def _free_mailbox(self) -> pushpull.Mailbox:
        # One whose worker was lost is never used again: the lost may come back and write to it.
        try:
            return self._mailboxes.pop()
        except IndexError:
            assert self._layout is not None
            return pushpull.Mailbox(self._layout)

    def _chance_of(self, piece: Any) -> np.ndarray:
        """Random states of a slice: the same whoever computes it, and whenever."""
        assert self._chance is not None
        states = self._chance.copy()
        if self.schedule.tau:
            states[:, 1] += np.uint32((piece.step - self._first) * _CHANCE_STRIDE)
        return np.array(
            [agreement.fold_seed(state, piece.slice) for state in states], "uint32"
        ).reshape(-1, 2)

    # On the servers.

    def _finish(self, step: int, results: list[Result]) -> None:
        count = len(results)
        if count not in self._commits:
            self._commits[count] = self._commit_function(count)
        moved = [
            sum((r.share * r.outputs["moved"][i] for r in results), start=0.0)
            for i in range(len(self._moving))
        ]
        moved = [tf.cast(m, v._value.dtype) for m, v in zip(moved, self._moving, strict=True)]
        mailboxes = [r.mailbox.handles for r in results if r.mailbox is not None]
        self._commits[count](mailboxes, moved)
        if not self.schedule.tau and results[0].outputs["chance"]:
            self._chance = np.array(results[0].outputs["chance"], "uint32")
        self._add_up(results)
        if self.schedule.tau != self._consistency.tau:
            self._count_rows(results)
        if self.schedule.tau:
            statistics = self.schedule.statistics
            self.logs["staleness_mean"] = statistics.mean
            self.logs["staleness_max"] = float(statistics.max)

    def _count_rows(self, results: list[Result]) -> None:
        rows = sum(int(r.outputs["rows"]) for r in results)
        # The first step of a run that is resumed stands for those before it.
        before = int(adopt.optimizers_of(self.model)[0].iterations.numpy()) if not self._rows else 1
        self._rows += rows * before

    def _commit_function(self, count: int) -> Callable:
        assert self._layout is not None
        # A handle's own specification would tell the mailbox's declared length, which is no length.
        handle = tf.TensorSpec([], tf.resource)
        function = tf.function(self._commit, autograph=False)
        return function.get_concrete_function(
            [[handle for _ in self._layout.slots] for _ in range(count)],
            [tf.TensorSpec(v.shape, v._value.dtype) for v in self._moving],
        )

    def _commit(self, mailboxes: list, moved: list) -> None:
        """Apply the gradients in some mailboxes; traced on the chief, runs on the servers."""
        assert self._layout is not None
        with extended.in_replica(self.strategy), tf.compat.v1.device(pushpull.near_inputs):
            gradients = {
                id(w): None if id(w) in self._without_gradient else g
                for w, g in zip(self._layout.weights, self._layout.take(mailboxes), strict=True)
            }
            for optimizer, parts in self._plan:
                adopt.apply_now(optimizer, [gradients[id(p)] for p in parts], parts)
            for variable, change in zip(self._moving, moved, strict=True):
                variable._value.assign_add(change)


class Testing(Counting):
    """`evaluate`'s batches: any order, nothing applied."""

    def __init__(self, adoption: ServedAdoption):
        strategy = adoption.strategy
        schedule = functools.partial(Schedule, Async().tau, strategy.slices)
        super().__init__(adoption, schedule)

    @property
    def ahead(self) -> int:
        """Workers shall find work waiting."""
        return 2 * self.strategy.workers

    def _prepare(self, spec: Any) -> None:
        key = pushpull.key_of(spec)
        if key not in self._functions:
            self._tables = adopt.tables_of(self.model)
            scalar = tf.TensorSpec([], tf.float32)
            function = tf.function(self._step, autograph=False)
            self._functions[key] = function.get_concrete_function(spec, scalar, scalar)
            self._reports[key] = self._report

    def _step(self, data: Any, share: Any, size: Any) -> tf.Tensor:
        with extended.in_replica(self.strategy):
            state, _ = self._state(self._tables)
            data = _whole_batch(data)
            apart = adopt.trace_apart(
                self.model.test_step,
                data,
                self.model,
                share=share,
                size=size,
                world_sum=self.strategy.sum_over_slices,
                state=state,
                tables=self._tables,
            )
            return self._report_of(self._count(apart, data))

    def _compute(self, work: Any, worker: int) -> Result:
        piece, batch = work
        return Result(*self._call(batch, piece, worker), batch.pipelines is not None)

    def _finish(self, step: int, results: list[Result]) -> None:
        self._add_up(results)


class Predicting(Loop):
    """`predict`'s batches: each cut into a slice per worker, rows put together in order."""

    def __init__(self, adoption: ServedAdoption):
        strategy = adoption.strategy
        schedule = functools.partial(Schedule, math.inf, strategy.workers)
        super().__init__(adoption, schedule)
        self.outputs: list = []

    def _prepare(self, spec: Any) -> None:
        key = pushpull.key_of(spec)
        if key not in self._functions:
            self._tables = adopt.tables_of(self.model)
            function = tf.function(self._step, autograph=False)
            self._functions[key] = function.get_concrete_function(spec)

    def _step(self, data: Any) -> Any:
        model = self.model
        with extended.in_replica(self.strategy):
            elsewhere = {id(v) for v in [*self._tables, *self.adoption.chance_states()]}
            elsewhere |= {id(v) for v in adopt.metric_variables(model)}
            state, _ = pushpull.pull(v for v in model.variables if id(v) not in elsewhere)
            return adopt.trace_apart(
                model.predict_step,
                adopt.without_optionals(data),
                model,
                share=tf.constant(1.0),
                size=tf.constant(1.0),
                world_sum=lambda value: value,
                state=state,
                tables=self._tables,
            ).logs

    def _compute(self, work: Any, worker: int) -> Result:
        piece, batch = work
        function = self._functions[pushpull.key_of(batch.spec)]
        outputs = function(batch.parts[piece.slice])
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


class ServedAdoption(adopt.Adoption):
    """What dtk keeps about a model whose weights are on parameter servers."""

    def __init__(self, model: Any, strategy: Any):
        super().__init__(model, strategy)
        self._parts: dict[int, list] = {}
        self._loops: dict[str, Any] = {}

    @property
    def takes_over(self) -> bool:
        """Always: even one worker is another process."""
        return True

    def bind_optimizers(self) -> None:
        """Let steps note their gradients."""
        for optimizer in adopt.optimizers_of(self.model):
            adopt.note_applies(optimizer, self.strategy, self.parts_of)

    def parts_of(self, variable: Any) -> list:
        """A Keras variable in a list, or its parts where it is partitioned."""
        return pushpull.parts_of(variable, self._parts)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of training; None before the first step."""
        loop = self._loops.get("train")
        return None if loop is None else loop.schedule

    def chance_states(self) -> list:
        """State of the model's random number generators."""
        return self.seed_states()

    # Data.

    def cut(self, dataset: Any) -> Any:
        """Every global batch in as many slices as a step has; pipelines of workers as they are."""
        if isinstance(dataset, worker_data.WorkerDataset):
            return dataset
        slices = self.strategy.slices
        return slicing.cut_dataset(dataset, range(slices), slices).prefetch(tf.data.AUTOTUNE)

    def take_epoch_iterator(self, iterator: Any = None, data_batch: Any = None) -> None:
        """As in the base, and wait for the workers when the data of an epoch ends."""
        if iterator is not None:
            self._check_steps(iterator)
        super().take_epoch_iterator(iterator, data_batch)
        if iterator is not None:
            adopt.at_end_of_data(iterator, self.settle)

    def _check_steps(self, iterator: Any) -> None:
        endless = isinstance(iterator.data_adapter.get_tf_dataset(), worker_data.WorkerDataset)
        if endless and iterator.steps_per_epoch is None:
            raise ValueError(
                "the workers read their own pipelines, which begin anew when they end, so the data "
                "does not tell how long an epoch is; give fit steps_per_epoch=, validation_steps=, "
                "and evaluate steps="
            )

    def new_epoch(self, epoch: int) -> None:
        """Begin what is observed anew."""
        loop = self._loops.get("train")
        if loop is not None:
            loop.new_epoch(epoch)

    def settle(self) -> None:
        """Wait until every step handed out is applied, and every batch counted."""
        for name, loop in self._loops.items():
            loop.drain()
            if name != "train":
                loop.close()  # inside `fit` the workers go back to training

    def leave(self) -> None:
        """The outermost call is over: send the workers home."""
        for loop in self._loops.values():
            loop.close()

    def _read(self, iterator: Any) -> Iterator[tuple[Any, Any]]:
        """Batches and the specification of their slices."""
        if isinstance(iterator, worker_data.Pipelines):
            yield from itertools.repeat((iterator, tf.data.IteratorSpec(iterator.element_spec)))
        if isinstance(iterator, tf.data.Iterator):
            spec = pushpull.spec_of(iterator.element_spec.parts[0])
            for batch in iterator:
                yield batch, spec
            return
        slices = self.strategy.slices
        for given in iterator:
            whole = tf.nest.map_structure(
                lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), given
            )
            yield slicing.cut(whole, range(slices), slices), pushpull.spec_of(whole)

    # Functions that Keras calls.

    def make_train_function(self, force: bool = False) -> Callable:
        """Replaces `Model.make_train_function` on the adopted model."""
        if self.model.train_function is None or force:
            self.bind_optimizers()
            self.model.train_function = self._make_function("train", Training(self))
        return self.model.train_function

    def make_test_function(self, force: bool = False) -> Callable:
        """Replaces `Model.make_test_function` on the adopted model."""
        if self.model.test_function is None or force:
            self.model.test_function = self._make_function("test", Testing(self))
        return self.model.test_function

    def _make_function(self, name: str, loop: Counting) -> Callable:
        if self.model.run_eagerly:
            raise ValueError(
                "run_eagerly=True, but steps run on workers, as graphs; to debug them in Python "
                "start the script without parameter servers, with dtk.auto_strategy()"
            )
        self._loops[name] = loop

        def run(iterator: Any) -> dict:
            done = 0
            for batch, spec in self._read(iterator):
                loop.step(batch, spec)
                done += 1
                if done == self.model.steps_per_execution:
                    break
            if not done:
                loop.drain()
                raise StopIteration
            if not isinstance(iterator, tf.data.Iterator | worker_data.Pipelines):
                loop.drain()
            return loop.logs

        return run

    def make_predict_function(self, force: bool = False) -> Callable:
        """Replaces `Model.make_predict_function` on the adopted model."""
        if self.model.predict_function is not None and not force:
            return self.model.predict_function
        loop = self._loops["predict"] = Predicting(self)
        workers = self.strategy.workers

        def run(batches: list) -> Any:
            for data in batches:
                if isinstance(data, worker_data.Pipelines):
                    raise ValueError(
                        "predict gives a result for every row, in order, which pipelines of the "
                        "workers' own do not have; give it arrays or a tf.data.Dataset"
                    )
                loop.step(slicing.cut(data, range(workers), workers), pushpull.spec_of(data))
            loop.drain()
            outputs, loop.outputs = loop.outputs, []
            return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

        self.model.predict_function = run
        return run

    def predict_on_batch(self, x: Any) -> Any:
        """Replaces `Model.predict_on_batch`."""
        batch = tf.nest.map_structure(tf.convert_to_tensor, (x,))
        outputs = self.make_predict_function()([batch])
        return keras.tree.map_structure(
            lambda leaf: leaf if isinstance(leaf, tf.RaggedTensor) else leaf.numpy(), outputs
        )
