"""XLA: whether it compiles a model's steps, and the part of a replica's step that it compiles.

The `jit_compile` given to `compile` decides:

    True     always; a model that XLA cannot compile is refused, here or by XLA at the first step
    "auto"   if Keras would choose it without a strategy, or DTK_JIT_COMPILE=1 does (as `dtk tune`
             may have found), unless the model communicates in its forward pass, which no compiled
             function can

XLA compiles a function as one cluster, which cannot communicate with other replicas. So the step is
traced inside a cluster, where optimizers only note their gradients; the rest follows outside:

    counts     denominators of masked means, summed over replicas   (only if a loss needs them)
    cluster    forward, backward, updates of metrics, moving statistics and random seeds
    outside    gradients exchanged and applied; metrics summed, and their results computed

The cluster returns all gradients at once, so communication does not overlap with the backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from dtk.cluster.variables import JIT_COMPILE, switch
from dtk.communicators.aligned_slices import concatenated
from dtk.compat import keras_models, keras_optimizers, keras_variables
from dtk.errors import UncompilableError, at_rank
from dtk.exchange.factors import Factored, factored
from dtk.kernels import optimizer_updates
from dtk.nests import Gradients, Tree
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.replica import step_metrics
from dtk.trainer.strategy import StepFunction, Strategy, tell
from dtk.trainer.tracing import lookups, loss_terms, traced_step


def settle(asked: bool | str | None, model: keras.Model, strategy: Strategy) -> bool | str | None:
    """Decide whether XLA compiles a model's steps; refuse `True` if it cannot."""
    auto = asked == "auto"
    if auto:
        layers = keras_models.layers_of(model)
        chosen = switch(os.environ, JIT_COMPILE, default=False)
        wished = chosen and all(one.supports_jit for one in layers)
        asked = strategy.supports_jit and (keras_models.auto_jit(model) or wished)
    keras_models.note_auto_jit(model, auto and bool(asked))
    why = asked and _why_not(model, strategy)
    if why:
        _say_or_refuse(model, strategy, why)
    return asked and not why


def recheck_jit(model: keras.Model, strategy: Strategy) -> None:
    """Decide again once a model is built: it may have new layers or another `jit_compile`."""
    why = model.jit_compile and _why_not(model, strategy)
    if why:
        fall_back_to_graph(model, strategy, why)


def fall_back_to_graph(model: keras.Model, strategy: Strategy, why: str) -> None:
    """Run a model uncompiled, since XLA cannot compile one of its steps; refuse if it must."""
    _say_or_refuse(model, strategy, why)
    model.jit_compile = False


def _say_or_refuse(model: keras.Model, strategy: Strategy, why: str) -> None:
    """Print why a model is not compiled, if Keras has chosen that; else raise."""
    if not keras_models.is_auto_jit(model):
        message = f"jit_compile=True: {why}; leave jit_compile out of compile of {model.name!r}"
        raise ValueError(at_rank(strategy.rank, message))
    tell(strategy, f"model {model.name!r} is not compiled by XLA (jit_compile='auto'): {why}")


def compile_updates(model: keras.Model, wished: bool) -> None:
    """Let XLA compile the variable updates of a model's optimizers, from the next trace on."""
    for optimizer in shared_optimizer.optimizers_of(model):
        for member in keras_optimizers.members(optimizer):
            optimizer_updates.compile_updates(member, wished)


def _why_not(model: keras.Model, strategy: Strategy) -> str | None:
    """Return why XLA cannot compile a model's steps under a strategy; None if it may."""
    if not strategy.supports_jit:
        name = type(strategy).__name__
        return f"{name} sends steps to workers, which dtk does not compile with XLA"
    if strategy.num_replicas_in_sync == 1 and strategy.world.size == 1:
        return None
    for layer in keras_models.layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            return (
                f"layer {layer.name!r} has synchronized=True, so it adds up moments over all "
                "replicas within the forward pass, and XLA can compile no communication, only a "
                "layer with synchronized=False"
            )
        if getattr(layer, "communicates", False):
            return (
                f"layer {layer.name!r} ({type(layer).__name__}) is one part of a layer and "
                "communicates within the forward pass, and XLA can compile no communication"
            )
    return None


# The compiled part of a step.

# What a cluster returns: gradients by optimizer, some as two factors or in pieces, and the tensors
# in the step's logs.
_Found: TypeAlias = tuple[list[list[Tree]], list[tf.Tensor]]


class _Noted(traced_step.NotedGradients):
    """Receiver of a compiled step's gradients; refuses gradients from a branch or loop."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[int] = []
        self._graph = tf.compat.v1.get_default_graph()

    def note(self, applied: traced_step.Applied) -> None:
        """See `NotedGradients.note`."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise UncompilableError("its train_step applies gradients in a branch or a loop")
        self.marks.append(len(self._graph.get_operations()))
        super().note(applied)


class _Counts:
    """The sums over replicas inside a step's losses: numbers of rows that count."""

    def __init__(self, totals: Sequence[tf.Tensor]):
        self.own: list[tf.Tensor] = []
        self._totals = totals

    def __call__(self, value: tf.Tensor) -> tf.Tensor:
        self.own.append(value)
        return self._totals[len(self.own) - 1] if self._totals else value


class CompiledStep:
    """A step of one replica, traced into a cluster."""

    def __init__(self, step_function: StepFunction, step: traced_step.Step, factors: bool):
        self._step_function = step_function
        self._step = step
        self._factors = factors
        self._noted: _Noted
        self._inside: traced_step.Step
        self._counts = _Counts(())
        self._pieces: list[list[lookups.LookupSlices]] = []
        self._logs: Tree = None

    def trace(self, data: Tree) -> Callable[[], Tree]:
        """Trace the cluster, check that it may hold the step, and return the whole step."""
        step = self._step
        totals: list[tf.Tensor] = []
        concrete = self._compiled(data, totals)
        self._check(concrete.graph)
        if self._counts.own:
            # Sum the counts before the cluster; this second trace computes nothing else.
            counting = tf.function(self._count, autograph=False)
            counts = counting.get_concrete_function(data, step.share)
            if _assigns(counts.graph):
                raise UncompilableError("its step assigns to variables that are not Keras's")
            totals = list(step.sum_over_replicas(counts(data, step.share)))
            concrete = self._compiled(data, totals)

        def run() -> Tree:
            gradients, logged = concrete(data, step.share, totals)
            step.take(self._inside)
            for applied, grads in zip(self._noted.applied, gradients, strict=True):
                whole = self._whole(grads)
                if applied.method == "apply":
                    applied.optimizer.apply(whole, applied.variables)
                else:
                    applied.optimizer.apply_gradients(zip(whole, applied.variables, strict=True))
            return self._logged(logged)

        return run

    def _compiled(
        self, data: Tree, totals: list[tf.Tensor]
    ) -> tf.types.experimental.ConcreteFunction:
        function = tf.function(
            self._compute, autograph=False, jit_compile=True, reduce_retracing=True
        )
        return function.get_concrete_function(data, self._step.share, totals)

    def _compute(self, data: Tree, share: tf.Tensor, totals: list[tf.Tensor]) -> _Found:
        """Compute the step up to its first communication; traced into the cluster."""
        self._noted, self._counts, self._pieces = _Noted(), _Counts(totals), []
        outside = self._step
        self._inside = inside = traced_step.Step(
            share,
            outside.model,
            self._counts,
            kinds=outside.kinds,
            weighs_loss=outside.weighs_loss,
            noted=self._noted,
            times=outside.times,
        )
        with traced_step.tracing(inside):
            logs = self._step_function(data)
            # Integers are weighed outside: their share is no integer.
            numbers = {
                one.name: one.value
                for one in step_metrics.numbers_of(inside, logs)
                if not one.dtype.is_integer
            }
            self._logs = step_metrics.with_numbers(logs, numbers)
        divided = [list(map(self._divided, applied.gradients)) for applied in self._noted.applied]
        if self._factors:
            divided = [[factored(gradient) for gradient in gradients] for gradients in divided]
        return divided, [value for value in keras.tree.flatten(self._logs) if tf.is_tensor(value)]

    def _divided(self, gradient: Tree) -> Tree:
        """Divide slices by their origin, which only the graph inside the cluster shows."""
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        pieces = lookups.pieces_of(gradient.indices, self._inside.graph)
        self._pieces.append(pieces)
        return lookups.parts_of(gradient, pieces)

    def _whole(self, gradients: list[Tree]) -> Gradients:
        """Multiply factors and join slices; the exchange finds the factors in the graph again."""
        products = [g.product() if isinstance(g, Factored) else g for g in gradients]
        return [self._joined(g) if isinstance(g, list) else g for g in products]

    def _joined(self, parts: list[tf.IndexedSlices]) -> tf.IndexedSlices:
        pieces = self._pieces.pop(0)
        for piece, part in zip(pieces, parts, strict=True):
            self._step.origins[part.indices.ref()] = piece.kind, piece.sure
        return concatenated(parts)

    def _count(self, data: Tree, share: tf.Tensor) -> list[tf.Tensor]:
        with keras.StatelessScope():
            self._compute(data, share, [])
        return self._counts.own

    def _logged(self, tensors: Sequence[tf.Tensor]) -> Tree:
        """Return the step's logs, with metric results over all replicas."""
        results: dict[int, dict[traced_step.Path, tf.Tensor]] = {}
        remaining = iter(tensors)
        logged = []
        for value in keras.tree.flatten(self._logs):
            if not tf.is_tensor(value):
                logged.append(value)
                continue
            outside = next(remaining)
            origin = self._inside.results.get(value.ref())
            if origin is None:
                logged.append(self._step.terms.mark_mean(outside))
                continue
            metric, path = origin
            if id(metric) not in results:
                results[id(metric)] = dict(keras.tree.flatten_with_path(metric.result()))
            logged.append(results[id(metric)][path])
        return keras.tree.pack_sequence_as(self._logs, logged)

    # Checks of what the cluster must not hold.

    def _check(self, graph: tf.Graph) -> None:
        names = [node.name for node in _nodes(graph) if node.op.startswith(_NOT_OF_XLA)]
        if names:
            raise UncompilableError(
                f"it communicates or calls Python within the step (op {names[0]!r}), and XLA can "
                "compile no communication and no Python"
            )
        self._check_order(graph)
        self._check_results()

    def _check_order(self, graph: tf.Graph) -> None:
        """Refuse a step that uses weights after their update: the cluster updates none."""
        inside = {id(outer): inner.ref() for outer, inner in graph.captures}
        for mark, applied in zip(self._noted.marks, self._noted.applied, strict=True):
            changed = [
                *applied.variables,
                *(v for v in applied.optimizer.variables if not v.path.endswith("learning_rate")),
            ]
            handles = {
                inside[id(copy.handle)]: keras_variables.path_of(v)
                for v in changed
                for copy in keras_variables.components(keras_variables.stored(v))
                if id(copy.handle) in inside
            }
            for op in graph.get_operations()[mark:]:
                for tensor in op.inputs:
                    if tensor.ref() in handles:
                        raise UncompilableError(
                            f"its {self._step_function.__name__} uses {handles[tensor.ref()]!r} "
                            "after an optimizer has changed it, and the compiled part of a step "
                            "ends before any update"
                        )

    def _check_results(self) -> None:
        """Refuse a step that computes with metric results: they are known outside only."""
        results = self._inside.results
        logged = [v for v in keras.tree.flatten(self._logs) if tf.is_tensor(v)]
        starts = [v for v in logged if v.ref() not in results]
        for tensor in loss_terms.computed_from(starts):
            if tensor.ref() in results:
                raise UncompilableError(
                    f"its {self._step_function.__name__} computes with the result of metric "
                    f"{results[tensor.ref()][0].name!r}, which is known outside the compiled part "
                    "only"
                )


# Types of ops that wait for other replicas begin with these; over MPI they are functions of Python.
_NOT_OF_XLA = ("Collective", "Horovod", "PyFunc", "EagerPyFunc")


def _nodes(graph: tf.Graph) -> Iterable[tf.compat.v1.NodeDef]:
    """Return the nodes of a graph and of the functions it calls."""
    definition = graph.as_graph_def()
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def _assigns(graph: tf.Graph) -> bool:
    return any(node.op.startswith("Assign") for node in _nodes(graph))
