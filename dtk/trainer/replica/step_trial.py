"""Run a step on a few rows of a batch, as a whole and in the parts of all replicas.

The steps apply no gradients, and every variable they assign gets its old value back.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import (
    keras_models,
    keras_optimizers,
    keras_steps,
    keras_variables,
    random_draws,
    tf_replicas,
)
from dtk.input import slicing
from dtk.nests import Array, Specs, Tree
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.model_state import ModelState
from dtk.trainer.replica import metric_trial, replica_step, step_metrics, whole_batch
from dtk.trainer.strategy import StepFunction
from dtk.trainer.tracing import lookups, traced_step
from dtk.trainer.tracing.row_dependence import EQUAL, RowDependence

# Few rows of each replica; the first takes one more, so that shares differ.
_ROWS = 2
# The most bytes of many rows, which each process gathers.
_BYTES = 8 << 20

# How far `Trial.moved` moves weights, relative to their size.
_FAR = 1e-2

# Traces a step, given a list for the variables that it assigns, and rows: of all, and of replicas.
Trace: TypeAlias = "Callable[[list[keras.Variable], Tree, tuple[Tree, ...]], Found]"

# What a traced step returns: the fields of `Outcome`, each a dict of tensors by name.
Found: TypeAlias = dict[str, Tree]


class Outcome(NamedTuple):
    """Results of a step on a few rows."""

    # value, numerator and denominator of each term on each replica: name -> `[n, 3]`
    terms: dict[str, Array]
    # gradients given to optimizers, summed over replicas, by variable and call
    gradients: dict[str, Array]
    state: dict[str, Array]  # values of the variables that the step assigned, by path
    logs: dict[str, Array]  # metric results and other logged numbers, by name
    # sums of the squares of slices given to optimizers, dense, by variable
    squares: dict[str, Array] = {}
    others: dict[str, Array] = {}  # logs of a replica that are not numbers, by name


class Snapshot:
    """Values of some variables, Keras's or TensorFlow's, on this process's replicas.

    Each replica gets its own value back, even where values differ by replica (metric state, dropout
    seeds, unfinished gradient accumulation). Nothing is communicated.

    Example:
        >>> import keras
        >>> variable = keras.Variable([1.0, 2.0])
        >>> before = Snapshot([variable])
        >>> variable.assign([3.0, 4.0]) is None
        False
        >>> before.restore()
        >>> variable.numpy().tolist()
        [1.0, 2.0]
    """

    def __init__(self, variables: Iterable[keras.Variable | tf.Variable]):
        self._kept: dict[int, tuple[tf.Variable, Array]] = {}
        for variable in variables:
            self.keep(variable)

    def keep(self, variable: keras.Variable | tf.Variable) -> None:
        """Keep the value of one more variable; a value kept before stays."""
        for copy in keras_variables.components(keras_variables.stored(variable)):
            self._kept.setdefault(id(copy), (copy, copy.numpy()))

    def restore(self) -> None:
        """Assign the values back."""
        for copy, value in self._kept.values():
            copy.assign(value)


def held_by_layers(model: keras.Model) -> list[tf.Variable]:
    """Return TensorFlow's own variables that are attributes of a model or layer, or in their lists.

    Keras does not count them among a model's.
    """
    held = [value for layer in keras_models.layers_of(model) for value in vars(layer).values()]
    members = [one for value in held for one in (value if isinstance(value, list) else [value])]
    return [one for one in members if isinstance(one, tf.Variable)]


def changed_by_training(model: keras.Model) -> list[keras.Variable | tf.Variable]:
    """Return every variable that a training step may change.

    Weights, seeds, metrics, and the state of optimizers and of the gradient exchange.
    """
    optimizers = shared_optimizer.optimizers_of(model)
    of_optimizers = [v for optimizer in optimizers for v in optimizer.variables]
    remembered = [
        v for e in shared_optimizer.gradient_exchanges_of(model) for v in e.state.variables
    ]
    return [*model.variables, *step_metrics.metric_variables(model), *of_optimizers, *remembered]


class Trial:
    """A step on a few rows that leaves every variable unchanged."""

    _moments = staticmethod(step_metrics.moments_of_all_replicas)
    may_join = False  # whether one process may compute all rows of a step that does not add up

    def __init__(self, trainer: ModelState, step_function: StepFunction, batch: slicing.Slices):
        self.trainer = trainer
        self.model, self.strategy = trainer.model, trainer.strategy
        self.step_function = step_function
        self.layouts: Mapping[int, str] = {}
        self.of_python = False  # whether NumPy's and Python's draws belong to rows, too
        self.draws: list[int] = []
        self.sums: frozenset[str] = frozenset()  # names of terms that the graph shows to be sums
        self.moves_weights = False  # whether the step assigns them besides its optimizer
        self.counted: list[metric_trial.Call] = []
        # losses that may be computed on the rows of all replicas, and the bytes of these in a step
        self.losses: dict[str, int] = {}
        self.doubtful: list[str] = []  # those of which the graph does not show that they add up
        self._calls = metric_trial.Calls(keras_models.foreign_metrics(self.model))
        self._moves: list[tuple[int, float]] = []  # seed and distance of each
        self._factor = tf.Variable(1.0, trainable=False)  # of gradients, see `magnified`
        # how it is computed -> the traced step, and what it assigns; for any number of rows
        self._concrete: dict[
            str, tuple[tf.types.experimental.ConcreteFunction, list[keras.Variable]]
        ] = {}
        self._specs: list[tf.TensorSpec] = []
        # The number of the first row of each part, and of all rows. A variable, since a graph shows
        # that these have one value in all replicas.
        self._bounds = tf.Variable([0], trainable=False, shape=[None], dtype=tf.int64)
        self._counts: dict[bool, tuple[int, ...]] = {}  # rows of each part, of few and of many
        self._kinds_of_data = _kinds_of(batch)
        self.parts: tuple[int, ...] = ()
        self.times_many = 1.0  # how many times as many rows many are as few
        self.take(batch)

    def take(self, batch: slicing.Slices, seed: int = 0, many: bool = False) -> bool:
        """Take rows of a batch: the first ones, or others by a seed. All ranks call it.

        Few rows show best that a mean of parts is not the mean of all; of `many`, as many as a
        replica computes of a batch, a term may show that needs so many, such as the 16 worst ones.

        Returns False, and keeps the rows before, if there are no others, or if replicas have other
        numbers of rows than then.
        """
        parts = tuple(replica_step.without_optionals(part) for part in batch.parts)
        replicas = max(self.strategy.num_replicas_in_sync, len(parts))  # or slices, behind servers
        share = replicas if many else None
        some = _some_rows(batch._replace(parts=parts), self._ranks(batch), share, seed)
        # Ragged and sparse tensors are sent as the tensors that they consist of.
        mine = [
            (int(count), [None if t is None else np.asarray(t) for t in _tensors_of(part)])
            for part, count in zip(some.parts, some.counts, strict=True)
        ]
        here = sum(map(int, batch.counts))
        gathered = self.strategy.communicator.allgather_object((here, mine))
        pieces = [piece for _, of_rank in gathered for piece in of_rank]
        counts = tuple(count for count, _ in pieces)
        if counts != self._counts.setdefault(many, counts):
            return False
        if counts == self.parts and not seed:  # the same rows again
            return False
        self.parts, self.rows = counts, sum(counts)
        self.batch_rows = sum(rows for rows, _ in gathered)
        few = _ROWS * replicas + 1
        self.times_many = max(1.0, self.batch_rows / replicas / few)
        self._bounds.assign(np.cumsum([0, *counts]))
        like = slicing.spec_of(some.parts[0])
        whole = tf.nest.map_structure(
            slicing.join_rows, *(_part_of(arrays, like) for count, arrays in pieces if count)
        )
        self._data = whole, some.parts
        self._tensors = [t for t in _tensors_of(self._data) if t is not None]
        specs = [spec for spec in _tensors_of(slicing.spec_of(self._data)) if spec is not None]
        if self._specs:
            both = zip(specs, self._specs, strict=True)
            specs = [one.most_specific_common_supertype([other]) for one, other in both]
        if specs != self._specs:  # such as longer texts
            self._specs = specs
            self._concrete.clear()
        return True

    def is_of(self, batch: slicing.Slices) -> bool:
        """Return whether a batch has what the trial has traced, in other rows."""
        return _kinds_of(batch) == self._kinds_of_data

    def _with_tensors(self, tensors: Sequence[tf.Tensor]) -> tuple[Tree, tuple[Tree, ...]]:
        """Return the rows that were taken, as a whole and in parts, of these tensors."""
        remaining = iter(tensors)
        leaves = [None if leaf is None else next(remaining) for leaf in _tensors_of(self._data)]
        return tf.nest.pack_sequence_as(self._data, leaves, expand_composites=True)

    def _rows_of(self, rank: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the number of rows of a part, that of its first row, and of all rows."""
        bounds = self._bounds.read_value()
        return bounds[rank + 1] - bounds[rank], bounds[rank], bounds[-1]

    @contextlib.contextmanager
    def moved(self, seed: int, distance: float = _FAR) -> Iterator[None]:
        """Return a context in which steps start from other weights, near those outside of it."""
        self._moves.append((seed, distance))
        try:
            yield
        finally:
            self._moves.pop()

    @contextlib.contextmanager
    def magnified(self, factor: float) -> Iterator[None]:
        """Return a context in which a script's step gets larger gradients from its tapes."""
        self._factor.assign(factor)
        try:
            yield
        finally:
            self._factor.assign(1.0)

    def whole(self) -> Outcome:
        """Compute the step by one replica."""
        with self.strategy.scope():  # variables built here belong to all replicas
            return self._compute("whole", self._trace_whole)

    def replicas(self, kinds: Mapping[str, str]) -> Outcome:
        """Compute the step by all replicas; each computes its part."""
        return self._compute(f"parts {sorted(kinds.items())}", self._trace_replicas(kinds))

    def _compute(self, way: str, trace: Trace) -> Outcome:
        """Compute a step one way, then restore every variable that it changed."""
        made = Snapshot([])
        if self.model.run_eagerly:
            before = Snapshot([*changed_by_training(self.model), *held_by_layers(self.model)])
            self._move_weights()
            with self._tracing(made), keras_models.numbers_kept(self.model):
                outputs = trace([], *self._data)
        else:
            way = f"{sorted(self.layouts.items())} {self.of_python} {way}"
            if way not in self._concrete:
                assigned: list[keras.Variable] = []

                def step(*tensors: tf.Tensor) -> Found:
                    whole, parts = self._with_tensors(tensors)
                    return trace(assigned, whole, parts)

                function = tf.function(step, autograph=False, input_signature=self._specs)
                with self._tracing(made):
                    self._concrete[way] = function.get_concrete_function(), assigned
            concrete, assigned = self._concrete[way]
            moved = self.model.trainable_variables if self._moves else []
            own = self._own_variables(concrete)
            before = Snapshot([*assigned, *own, *moved])
            self._move_weights()
            outputs = concrete(*self._tensors)
            outputs["state"] |= {
                f"{v.name} at {id(v):#x}": v.numpy() for v in own if v.dtype.is_floating
            }
        before.restore()
        made.restore()
        arrays = keras.tree.map_structure(np.asarray, outputs)
        if "calls" in arrays:
            self.counted = self._calls.arrays(arrays.pop("calls"))
            times = self.batch_rows / self.rows
            self.losses = {k: int(n * times) for k, n in arrays.pop("sizes", {}).items()}
        return Outcome(**arrays)

    @contextlib.contextmanager
    def _tracing(self, made: Snapshot) -> Iterator[None]:
        """Return a context in which a step is traced, or run eagerly, as it is to be tried."""
        with (
            keras_variables.created_at_once(made.keep),
            self._global_numbers(),
            keras_steps.patch_moments(self._moments),
            whole_batch.losses_of_all_rows(self.model),
            keras_steps.patch_sums_of_losses(whole_batch.summed_by_losses),
            random_draws.by_row(self.layouts, self.of_python) as drawn,
            keras_steps.all_synchronized(self.model),
        ):
            yield
        self.draws = [*dict.fromkeys(drawn)] or self.draws

    def _move_weights(self) -> None:
        weights = [keras_variables.stored(v) for v in self.model.trainable_variables]
        for (seed, distance), (i, variable) in itertools.product(self._moves, enumerate(weights)):
            for copy in keras_variables.components(variable):
                value = copy.numpy().astype("float32")
                # Move zeros, too, such as a bias before a ReLU.
                most = distance * (0.1 + np.sqrt(np.mean(np.square(value))))
                if not np.isfinite(most):
                    continue
                way = np.random.default_rng((seed, i)).uniform(-most, most, value.shape)
                copy.assign(tf.cast(value + way, copy.dtype))

    @contextlib.contextmanager
    def _global_numbers(self) -> Iterator[None]:
        """Return a context in which a step's losses and metrics are over all replicas."""
        metrics = keras_models.metrics_of(self.model)
        results = keras_steps.patch_metrics(metrics, "result", step_metrics.result_of)
        with traced_step.weighing_by_rows(), results:
            yield

    def _ranks(self, batch: slicing.Slices) -> Sequence[int]:
        """Return the ranks whose parts this process has."""
        return self.strategy.local_ranks()

    def _own_variables(
        self, concrete: tf.types.experimental.ConcreteFunction
    ) -> list[tf.Variable]:
        """Return the variables of a traced step that are not Keras's: it may assign them."""
        of_keras = {
            id(copy)
            for v in changed_by_training(self.model)
            for copy in keras_variables.components(keras_variables.stored(v))
        }
        return [v for v in concrete.graph.variables if id(v) not in of_keras]

    def _trace_whole(
        self, assigned: list[keras.Variable], whole: Tree, parts: tuple[Tree, ...]
    ) -> Found:
        del parts
        with tf_replicas.as_one_replica(self.strategy):
            rows = self._bounds[-1]
            random_draws.restart(rows, 0, rows, self.of_python)
            step = traced_step.Step(
                tf.ones([]),
                self.model,
                tf.identity,
                rows,
                weighs_loss=traced_step.takes_own_step(self.step_function, self.model),
                tried=True,
                noted=traced_step.NotedGradients(),
                notes_losses=True,
                times=self._factor,
            )
            with traced_step.tracing(step), self._calls.noted():
                logs = self.step_function(slicing.forget_rows(whole))
                observed = self._observed(step, logs, assigned)
                self.sums = shown_sums(step)
                weights = {id(v) for v in self.model.trainable_variables}
                self.moves_weights = not weights.isdisjoint(step.assigned)
                losses = {name: c for name, c in step.losses.items() if c.has_rows and self.gathers}
                self.doubtful = [name for name in doubtful_in(step) if name in losses]
                sizes = {name: _bytes_of(call.tensors) for name, call in losses.items()}
                return observed | {"calls": self._calls.tensors(), "sizes": sizes}

    def _trace_replicas(self, kinds: Mapping[str, str]) -> Trace:
        strategy, model = self.strategy, self.model
        sequence = strategy.new_sequence("self_test")

        def trace(
            assigned: list[keras.Variable], whole: Tree, parts: tuple[Tree, ...]
        ) -> Found:
            del whole
            ranks = strategy.local_ranks()
            counts = tuple(self._rows_of(rank)[0] for rank in ranks)
            few = slicing.Slices(parts, counts, self._bounds[-1])

            @tf.autograph.experimental.do_not_convert
            def one(batch: slicing.Slices) -> Found:
                with strategy.sequence(sequence):
                    rows, first, of_all = self._rows_of(ranks[strategy.local_index()])
                    random_draws.restart(tf.maximum(rows, 1), first, of_all, self.of_python)
                    data, step = replica_step.begin_step(
                        self.step_function, batch, model, strategy, kinds
                    )
                    world = step_metrics.WorldState(step)
                    step.tried, step.noted = True, traced_step.NotedGradients()
                    step.times = self._factor
                    step.result_of = world.result_of
                    turns = replica_step.taking_turns(model, strategy)
                    with traced_step.tracing(step), tf_replicas.counted_if(step.present), turns:
                        logs = self.step_function(data)
                        if self.step_function.__name__ == "train_step":
                            replica_step.check_reduced(step, strategy)
                        world.average()
                        return self._observed(step, logs, assigned, of_replicas=True)

            gathered = self.trainer.metrics_of_all_rows
            assigned.extend(v for metric in gathered for v in metric.variables)  # outside the step
            with whole_batch.counted_on_all_rows(gathered):
                observed = strategy.run(one, args=(few,))
            first = keras.tree.map_structure(
                lambda value: strategy.experimental_local_results(value)[0], observed
            )
            return first | {"terms": strategy.join_outputs(observed["terms"])}

        return trace

    @property
    def gathers(self) -> bool:
        """Whether replicas may gather rows of losses and metrics in each step."""
        compiled = self.model.jit_compile and not keras_models.is_auto_jit(self.model)
        return not (compiled or self.trainer.has_local_steps)

    def _observed(
        self,
        step: traced_step.Step,
        logs: Tree,
        assigned: list[keras.Variable],
        of_replicas: bool = False,
    ) -> Found:
        """Return a traced step's results, and add the variables that it assigns to `assigned`."""
        strategy = self.strategy
        numbers = step_metrics.numbers_of(step, logs)
        others = step_metrics.others_of(step, logs)
        results = results_of(self.model)
        applied = step.noted.applied if step.noted else []
        gradients, sparse = gradients_of(applied), slices_of(applied)
        own = {
            id(v) for v in [*step_metrics.metric_variables(self.model), *self.trainer.seed_states()]
        }
        state = {v.path: tf.identity(v) for key, v in step.assigned.items() if key not in own}
        terms = terms_of(step)
        assigned.extend(step.assigned.values())
        with tf_replicas.counted_if(None):
            weighed = {one.name: step.weighed(one.value) for one in numbers}
            if of_replicas:
                divided, join = lookups.divided([*sparse.values()], [*sparse], strategy.rank)
                whole = join(strategy.extended.reduce_over_replicas(divided)) if divided else []
                sparse = dict(zip(sparse, whole, strict=True))
                terms = strategy.gather_outputs(terms)
                gradients, weighed = _sum_over_replicas(gradients), _sum_over_replicas(weighed)
            return {
                "terms": terms,
                "gradients": gradients,
                "squares": {name: lookups.squares_of(g) for name, g in sparse.items()},
                "state": state,
                "logs": results | {name: tf.cast(v, tf.float64) for name, v in weighed.items()},
                "others": others,
            }


def _sum_over_replicas(values: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    # As a list: names may differ by rank, and with them their order in a dict.
    return dict(zip(values, whole_batch.sum_over_replicas([*values.values()]), strict=True))


def doubtful_in(step: traced_step.Step) -> list[str]:
    """Return the losses of a step of which its graph does not show that they add up."""
    return [name for name, one in step.losses.items() if one.has_rows and not one.adds_up]


def results_of(model: keras.Model) -> dict[str, tf.Tensor]:
    """Compute the results of a model's metrics."""
    metrics = keras_models.metrics_with_results_of(model)
    results = {metric.name: metric.result() for metric in metrics}
    # A metric may have several results, and one of all that were compiled has dicts in a dict.
    return {
        "/".join(path[1:] or path): tf.cast(value, tf.float64)
        for path, value in keras.tree.flatten_with_path(results)
    }


def gradients_of(applied: Sequence[traced_step.Applied]) -> dict[str, tf.Tensor]:
    """Return the dense value of each gradient given to optimizers, in order."""
    return {name: tf.convert_to_tensor(g) for name, _, g in _handed(applied)}


def slices_of(applied: Sequence[traced_step.Applied]) -> dict[str, tf.IndexedSlices]:
    """Return each sparse gradient whose slices count one by one, in order."""
    return {
        name: g
        for name, optimizer, g in _handed(applied)
        if isinstance(g, tf.IndexedSlices) and not keras_optimizers.is_linear(optimizer)
    }


def _handed(
    applied: Sequence[traced_step.Applied],
) -> Iterator[tuple[str, keras.Optimizer, tf.Tensor | tf.IndexedSlices]]:
    """Yield each gradient given to an optimizer, named by variable and update."""
    for i, (optimizer, gradients, variables, _) in enumerate(applied):
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                path = keras_variables.path_of(variable)
                name = f"{path} (update {i + 1})" if i else path
                yield name, optimizer, gradient


def terms_of(step: traced_step.Step) -> dict[str, tf.Tensor]:
    """Return value, numerator and denominator of each term of a replica's step, of shape [1, 3]."""
    nothing = tf.constant(np.nan, tf.float64)
    return {
        name: tf.stack([[nothing if t is None else tf.cast(t, tf.float64) for t in term]])
        for name, term in step.terms.by_name.items()
    }


def shown_sums(step: traced_step.Step) -> frozenset[str]:
    """Return the terms that the graph shows to be sums over rows.

    A count that is zero for the rows of a trial does not show by its value what it is.
    """
    known = RowDependence(step.graph)
    terms = step.terms.by_name.items()
    return frozenset(name for name, term in terms if _sums_rows(term.value, known))


def _sums_rows(scalar: tf.Tensor, known: RowDependence) -> bool:
    if not tf.is_symbolic_tensor(scalar):
        return False
    while scalar.op.type in ("Cast", "Identity", "Reshape"):
        scalar = scalar.op.inputs[0]
    if scalar.op.type != "Sum":
        return False
    sizes = known.sizes(scalar.op.inputs[0])
    return sizes is None or not set(sizes) <= {EQUAL}


# The rows.


def _some_rows(
    batch: slicing.Slices, ranks: Sequence[int], share: int | None, seed: int
) -> slicing.Slices:
    """Take few rows, or a share, of each of this process's slices; a padding row stays one."""
    parts, counts = [], []
    for rank, part, count in zip(ranks, batch.parts, map(int, batch.counts), strict=True):
        rows = _ROWS
        if share is not None:
            tensors = [t for t in _tensors_of(part) if t is not None]
            size = sum(t.dtype.size * (t.shape.num_elements() or 0) for t in tensors)
            rows = max(_ROWS, min(count, _BYTES * count // max(size, 1)) // share)
        rows = min(count, rows + (rank == 0))
        first = int(np.random.default_rng((seed, rank)).integers(count - rows + 1)) * (seed > 0)
        parts.append(slicing.rows_of(part, first, first + max(rows, 1)))
        counts.append(tf.constant(rows, tf.int64))
    return batch._replace(parts=tuple(parts), counts=tuple(counts))


def _kinds_of(batch: slicing.Slices) -> list[tuple[tf.DType, int | None] | None]:
    """Return type and number of axes of each tensor of a batch, and where one is absent."""
    tensors = _tensors_of(replica_step.without_optionals(batch.parts[0]))
    return [None if one is None else (one.dtype, one.shape.rank) for one in tensors]


def _bytes_of(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.size(tensor, tf.int64) * tensor.dtype.size for tensor in tensors])


def _tensors_of(part: Tree) -> list[tf.Tensor | None]:
    return tf.nest.flatten(part, expand_composites=True)


def _part_of(arrays: list[Array | None], like: Specs) -> Tree:
    tensors = [None if array is None else tf.convert_to_tensor(array) for array in arrays]
    return tf.nest.pack_sequence_as(like, tensors, expand_composites=True)
