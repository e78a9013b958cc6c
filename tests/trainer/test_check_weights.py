"""`strategy.check_weights` compares weights and optimizer state over all replicas."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from dtk.errors import DisagreementError
from dtk.trainer.gradients.shared_optimizer import optimizers_of

from support import bodies


def checked(devices=0):
    """What is said of equal weights, and once weights, state or shapes differ."""
    strategy = bodies.strategy(devices)
    keras.utils.set_random_seed(3)  # whatever ran in this world before
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


@pytest.mark.parametrize("backend, size", [("local", 1), ("collective", 2), ("mirrored", 2)])
def test_the_first_variable_that_differs_is_named_on_every_rank(world, backend, size):
    mirrored = backend == "mirrored"
    world = world("local" if mirrored else backend, 1 if mirrored else size)
    for rank, told in enumerate(world.run(checked, size if mirrored else 0)):
        # Kernel, bias, the rate and the count of steps; after the first step their momenta too.
        assert (told["before"], told["after"]) == (4, 6)
        assert told["uncompiled"].startswith(f"ValueError: rank {rank}: model 'unknown' was not ")
        if size == 1:
            assert (told["state"], told["weights"], told["shapes"]) == (6, 6, 4)
            continue
        start = f"DisagreementError: rank {rank}: when asked, "
        assert told["state"].startswith(start + "1 of 6 variables of model ")
        # "SGD/" before Keras 3.14
        assert "the first is 'sgd/" in told["state"].lower() and "momentum" in told["state"]
        assert told["weights"].startswith(start + "2 of 6 variables of model ")
        assert "/only/kernel'" in told["weights"]
        if not mirrored:
            assert "ranks disagree on the variable 0 of model" in told["shapes"]
            assert "(4, 1) float32" in told["shapes"] and "(4, 2) float32" in told["shapes"]


def test_optimizers_in_lists_and_dicts_are_found():
    """What is compared and saved, and exchanges its gradients."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.others = {"critic": keras.optimizers.Adam()}
    model.more = [keras.optimizers.SGD()]
    assert optimizers_of(model) == [model.optimizer, model.others["critic"], model.more[0]]
