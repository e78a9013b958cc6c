"""Every optimizer behind parameter servers."""

from __future__ import annotations

import contextlib

import keras
import numpy as np

from strategies.bodies import flat, served_with
from strategies.served_bodies import Partitioner

o = keras.optimizers
OPTIMIZERS = {
    "sgd": lambda: o.SGD(0.1),
    "momentum": lambda: o.SGD(0.1, momentum=0.9),
    "nesterov": lambda: o.SGD(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: o.RMSprop(0.01),
    "rmsprop momentum": lambda: o.RMSprop(0.01, momentum=0.9),
    "rmsprop centered": lambda: o.RMSprop(0.01, centered=True, momentum=0.5),
    "adam": lambda: o.Adam(0.01),
    "amsgrad": lambda: o.Adam(0.01, amsgrad=True),
    "adamw": lambda: o.AdamW(0.01),
    "adamax": lambda: o.Adamax(0.01),
    "nadam": lambda: o.Nadam(0.01),
    "adagrad": lambda: o.Adagrad(0.1),
    "adadelta": lambda: o.Adadelta(1.0),
    "ftrl": lambda: o.Ftrl(0.1),
    "ftrl l1": lambda: o.Ftrl(0.1, l1_regularization_strength=0.01),
    "lion": lambda: o.Lion(0.01),
    "adafactor": lambda: o.Adafactor(0.01),
    "lamb": lambda: o.Lamb(0.01),
    "muon": lambda: o.Muon(0.01),
    "schedule free": lambda: o.ScheduleFreeAdamW(0.01),
    "loss scaling": lambda: o.LossScaleOptimizer(o.RMSprop(0.01), initial_scale=64.0),
    "clipnorm": lambda: o.RMSprop(0.01, clipnorm=0.1),
    "global clipnorm": lambda: o.RMSprop(0.01, global_clipnorm=0.1),
    "clipvalue": lambda: o.RMSprop(0.01, clipvalue=0.001),
    "ema": lambda: o.RMSprop(0.01, use_ema=True, ema_momentum=0.9),
    "ema often": lambda: o.RMSprop(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "accumulation": lambda: o.RMSprop(0.01, gradient_accumulation_steps=2),
    "decay": lambda: o.RMSprop(0.01, weight_decay=0.1),
    "scale factor": lambda: o.RMSprop(0.01, loss_scale_factor=8.0),
    "multi": lambda: o.MultiOptimizer(
        lambda v, found={}: found.setdefault(
            "x" if "embedding" in v.name else "y", o.SGD(0.1) if "embed" in v.name else o.Adam(0.01)
        )
    ),
}


def dtk_optimizers():
    import dtk

    return {
        "LARS": lambda: dtk.optimizers.LARS(1.0, weight_decay=1e-4),
        "LAMB": lambda: dtk.optimizers.LAMB(0.01, weight_decay=0.01),
        "RMSpropWarmup": lambda: dtk.optimizers.RMSpropWarmup(0.01, steps_per_epoch=3),
    }


def fitted(optimizer, consistency, parts):
    keras.utils.set_random_seed(5)
    strategy = served_with(consistency) if consistency else None
    tokens = np.random.default_rng(0).integers(0, 1001, (48, 6))
    tokens[:, 1] = tokens[:, 0]
    labels = (tokens.sum(1) % 4).astype("int64")
    if strategy is not None:
        strategy.extended._variable_partitioner = Partitioner(parts)
    try:
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential(
                [
                    keras.Input((6,), dtype="int32"),
                    keras.layers.Embedding(1001, 8),
                    keras.layers.Flatten(),
                    keras.layers.Dense(4),
                ]
            )
            model.compile(
                optimizer(),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        model.fit(tokens, labels, batch_size=16, epochs=2, verbose=0)
        return flat(model.get_weights())
    finally:
        if strategy is not None:
            strategy.extended._variable_partitioner = None


def every(consistency, parts, names=None):
    found = {}
    for name, make in {**OPTIMIZERS, **dtk_optimizers()}.items():
        if names and name not in names:
            continue
        try:
            found[name] = fitted(make, consistency, parts)
        except Exception as error:
            import traceback
            found[name] = (f"{type(error).__name__}: {str(error)[:600]}", traceback.format_exc())
    return found
