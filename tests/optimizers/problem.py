"""A few variables, the gradients they get, and what an optimizer makes of them."""

from __future__ import annotations

import keras
import numpy as np

SHAPES = {"kernel": (4, 3), "filters": (2, 2, 3, 2), "head": (3, 2), "bias": (3,), "scale": ()}
STEPS = 6


def weights(seed=0):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}


def gradients(steps=STEPS, seed=1):
    """One dict for each step; the kernel's is zero once."""
    random = np.random.default_rng(seed)
    drawn = [
        {name: random.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}
        for _ in range(steps)
    ]
    drawn[steps // 2]["kernel"] *= 0.0
    return drawn


def variables(start=None):
    return [keras.Variable(value, name=name) for name, value in (start or weights()).items()]


def taken(optimizer, steps=None, start=None):
    """The weights after these steps, by name."""
    trained = variables(start)
    optimizer.build(trained)
    for gradient in steps or gradients():
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in gradient.values()], trained)
    return {v.name: v.numpy() for v in trained}


def length(x):
    return np.sqrt(np.sum(np.square(x, dtype="float64")))


def check(got, expected, rtol=1e-4):
    """In float32, 1 - 0.999^t alone is off by 6e-5."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=rtol, atol=1e-6, err_msg=name)
