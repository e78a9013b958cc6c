"""Decide whether XLA compiles a model's steps, from the `jit_compile` given to `compile`.

    True     always; a model that XLA cannot compile is refused, here or by XLA at the first step
    "auto"   if Keras would choose it without a strategy, or DTK_JIT_COMPILE=1 does (as `dtk tune`
             may have found), unless the model communicates in its forward pass, which no compiled
             function can

`replica/compiled_step.py` says which part of a step is compiled.
"""

from __future__ import annotations

import os
import sys

import keras

from dtk.cluster.variables import JIT_COMPILE
from dtk.compat import fused_kernels, keras_models
from dtk.errors import at_rank
from dtk.trainer.gradients import shared_optimizer, variable_parts
from dtk.trainer.strategy import Strategy


def settle(asked: bool | str | None, model: keras.Model, strategy: Strategy) -> bool | str | None:
    """Decide whether XLA compiles a model's steps; refuse `True` if it cannot."""
    auto = asked == "auto"
    if auto:
        asked = strategy.supports_jit and (keras_models.auto_jit(model) or _is_wished_for(model))
    keras_models.note_auto_jit(model, auto and bool(asked))
    why = asked and _why_not(model, strategy)
    if why:
        _say_or_refuse(model, strategy, why)
    return asked and not why


def _is_wished_for(model: keras.Model) -> bool:
    wished = os.environ.get(JIT_COMPILE) == "1"
    return wished and all(layer.supports_jit for layer in keras_models.layers_of(model))


def settle_built(model: keras.Model, strategy: Strategy) -> None:
    """Decide again once a model is built: it may have new layers or another `jit_compile`."""
    why = model.jit_compile and _why_not(model, strategy)
    if why:
        _say_or_refuse(model, strategy, why)
        model.jit_compile = False


def leave(model: keras.Model, strategy: Strategy, why: str) -> None:
    """Run a model uncompiled, since XLA cannot compile one of its steps; refuse if it must."""
    refused = f"XLA cannot compile model {model.name!r} under several replicas: {why}; leave "
    _say_or_refuse(model, strategy, why, refused + "jit_compile out")
    model.jit_compile = False


def _say_or_refuse(
    model: keras.Model, strategy: Strategy, why: str, refused: str | None = None
) -> None:
    """Print why a model is not compiled, if Keras has chosen that; else raise."""
    if not keras_models.is_auto_jit(model):
        raise ValueError(at_rank(strategy.rank, f"jit_compile=True: {refused or why}"))
    if strategy.is_chief:
        print(
            f"dtk: model {model.name!r} is not compiled by XLA (jit_compile='auto'): {why}",
            file=sys.stderr,
            flush=True,
        )


def compile_updates(model: keras.Model, wished: bool) -> None:
    """Let XLA compile the variable updates of a model's optimizers, from the next trace on."""
    for optimizer in shared_optimizer.optimizers_of(model):
        for member in variable_parts.members(optimizer):
            fused_kernels.compile_updates(member, wished)


def _why_not(model: keras.Model, strategy: Strategy) -> str | None:
    """Return why XLA cannot compile a model's steps under a strategy; None if it may."""
    if not strategy.supports_jit:
        return (
            f"{type(strategy).__name__} sends steps to workers, which dtk does not compile with "
            "XLA; leave jit_compile out"
        )
    if strategy.num_replicas_in_sync == 1 and strategy.world.size == 1:
        return None
    for layer in keras_models.layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            return (
                f"layer {layer.name!r} has synchronized=True, so it adds up moments over all "
                "replicas within the forward pass, and XLA can compile no communication; leave "
                "jit_compile out, or make the layer with synchronized=False"
            )
        if getattr(layer, "communicates", False):
            return (
                f"layer {layer.name!r} ({type(layer).__name__}) is one part of a layer and "
                "communicates within the forward pass, and XLA can compile no communication; "
                "leave jit_compile out"
            )
    return None
