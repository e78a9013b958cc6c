"""Why a model's step is tried: what is not Keras's own, or is computed along axis 0."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import keras

from dtk.compat import keras_models, keras_optimizers
from dtk.trainer.gradients import shared_optimizer

ALONG = "along axis 0"
PADDING = "without output_sequence_length"


def of_step(model: keras.Model, step_name: str) -> list[str]:
    """Return the parts of a model's step that are not Keras's own and so must be tried."""
    parts = of_predict(model, step_name)
    if not keras_models.computes_own_loss(model):
        parts.append(f"compute_loss of {type(model).__name__}")
    parts += [f"loss {_called(loss)}" for loss in keras_models.foreign_losses(model)]
    metrics = map(keras_models.unwrapped, keras_models.foreign_metrics(model))
    parts += [f"metric {_called(metric)}" for metric in metrics]
    if not keras_models.is_from_keras(type(model).compute_metrics):
        parts.append(f"compute_metrics of {type(model).__name__}")
    return parts + (["lookups under run_eagerly"] if _looks_up_eagerly(model) else [])


def of_predict(model: keras.Model, step_name: str = "predict_step") -> list[str]:
    """Return a model's step and layers that are not Keras's own, or compute along the batch."""
    own_step = not keras_models.is_from_keras(getattr(type(model), step_name))
    parts = [f"{step_name} of {type(model).__name__}"] if own_step else []
    layers = {type(layer).__name__ for layer in keras_models.layers_of(model) if _is_foreign(layer)}
    parts += [f"layer {name}" for name in sorted(layers)]
    along = filter(_is_along_batch, keras_models.layers_of(model))
    parts += [f"layer {layer.name} {ALONG}" for layer in along]
    padding = filter(_pads, keras_models.layers_of(model))
    parts += [f"layer {layer.name} {PADDING}" for layer in padding]
    own = [f for layer in keras_models.layers_of(model) for f in _own_activations(layer)]
    parts += [f"activation {name}" for name in sorted({*map(_called, own)})]
    return parts + [f"operation {name}" for name in keras_models.combining_operations(model)]


def told_whether_it_trains(model: keras.Model) -> list[str]:
    """Return what a script has written that may compute another thing in a test step."""
    calls = {type(one).__name__: type(one).call for one in keras_models.layers_of(model)}
    told = [
        f"layer {name} with training=False"
        for name, call in sorted(calls.items())
        if not keras_models.is_from_keras(call) and "training" in inspect.signature(call).parameters
    ]
    return told if keras_models.computes_own_loss(model) else ["compute_loss", *told]


def _looks_up_eagerly(model: keras.Model) -> bool:
    """Return whether an optimizer squares slices and no graph shows their origin."""
    if not model.run_eagerly:
        return False
    linear = all(map(keras_optimizers.is_linear, shared_optimizer.optimizers_of(model)))
    layers = keras_models.layers_of(model)
    return not linear and any(isinstance(one, keras.layers.Embedding) for one in layers)


def _called(thing: object) -> str:
    return str(getattr(thing, "__name__", type(thing).__name__))


def _is_foreign(layer: keras.Layer) -> bool:
    if isinstance(layer, keras.layers.Lambda):
        return True
    if getattr(layer, "activity_regularizer", None) is not None:
        return True
    if type(layer).__module__.startswith("dtk."):
        return False
    call = getattr(type(layer), "call", None)
    return call is not None and not keras_models.is_from_keras(call)


def _is_along_batch(layer: keras.Layer) -> bool:
    return keras_models.is_from_keras(type(layer)) and keras_models.is_along_batch(layer)


def _own_activations(layer: keras.Layer) -> Iterator[object]:
    """Yield the activations of a layer that a script has written."""
    for name in ("activation", "recurrent_activation"):
        activation = getattr(layer, name, None)
        module = str(getattr(activation, "__module__", ""))
        known = activation is None or keras_models.is_from_keras(activation)
        if not known and not module.startswith("tensorflow."):
            yield activation


def _pads(layer: keras.Layer) -> bool:
    """Return whether a layer pads a batch to its longest row, which another rank may have."""
    if not isinstance(layer, keras.layers.TextVectorization):
        return False
    config = layer.get_config()
    return config["output_mode"] == "int" and config["output_sequence_length"] is None
