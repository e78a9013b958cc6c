"""What tests of `strategy.check_weights` run on every rank."""

from __future__ import annotations

import numpy as np

from dtk.errors import DisagreementError

from strategies import bodies


def checked(devices=0):
    """What is said of equal weights, and once weights, state or shapes differ."""
    import keras

    strategy = bodies.strategy(devices)
    x = np.linspace(-1, 1, 48).reshape(12, 4).astype("float32")

    def build(units=1):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, name="only")])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    with strategy.scope():
        model, other = build(), build(1 + strategy.rank)
    told = {"before": strategy.check_weights(model)}
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    told["after"] = strategy.check_weights(model)

    def apart(variable):
        ranks = strategy.local_ranks()
        strategy.set_per_replica(variable, [np.full(variable.shape, 1.0 * r) for r in ranks])

    def said(about):
        try:
            return strategy.check_weights(about)
        except (DisagreementError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    apart(model.optimizer.variables[-1])
    told["state"] = said(model)
    apart(model.layers[0].kernel)
    told["weights"] = said(model)
    told["shapes"] = said(other)
    told["uncompiled"] = said(keras.Sequential(name="unknown"))
    return told
