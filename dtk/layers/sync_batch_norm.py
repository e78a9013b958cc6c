"""Make an existing model normalize batches over the rows of all workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import keras

from dtk.compat.keras_models import layers_of

_Model = TypeVar("_Model", bound=keras.Model)


def convert_sync_batchnorm(model: _Model) -> _Model:
    """Make every BatchNormalization of a model compute its statistics over all workers.

    The layers stay the same objects with the same weights, so shared layers stay shared, also in
    nested and subclassed models. N workers then train like one process on the whole batch (Ioffe
    and Szegedy, arXiv:1502.03167; Goyal et al., arXiv:1706.02677, leave it out).

    Args:
        model: A functional, Sequential or subclassed model; changed in place. Traced steps are
            traced again.

    Returns:
        The model.

    Raises:
        ValueError: Keras does not know a BatchNormalization as part of the model, for example
            because an object of the script holds it; the error names it.

    Example:
        >>> import dtk, keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
        >>> dtk.layers.convert_sync_batchnorm(model).layers[0].synchronized
        True
    """
    layers = layers_of(model)
    known = {id(layer) for layer in layers}
    for layer in (model, *layers):
        for place, norm in _kept_in(layer):
            if id(norm) not in known:
                raise ValueError(
                    f"BatchNormalization {norm.name!r} in {type(layer).__name__} {layer.name!r}, "
                    f"{place}: Keras does not count it among the model's layers, so its weights "
                    "would not be trained; make it an attribute, or part of a list or dict, of a "
                    "Keras layer"
                )
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
    for one in (model, *layers):
        if isinstance(one, keras.Model):
            one.train_function = one.test_function = None
    return model


def _kept_in(owner: object) -> Iterator[tuple[str, keras.layers.BatchNormalization]]:
    """Yield the normalizations in an object's attributes, and in the attributes of these."""
    for name, item in _attributes(owner):
        held = [(name, item)]
        if not isinstance(item, keras.layers.Layer | keras.Variable | type):
            held += [(f"{name}.{inner}", one) for inner, one in _attributes(item)]
        for place, one in held:
            if isinstance(one, keras.layers.BatchNormalization):
                yield f"attribute {place!r}", one


def _attributes(owner: object) -> Iterator[tuple[str, object]]:
    """Yield names and values of attributes, and what containers among them hold."""
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        items = value.values() if isinstance(value, Mapping) else value
        several = isinstance(value, Mapping | list | tuple | set | frozenset)
        yield from ((name, item) for item in (list(items) if several else [value]))
