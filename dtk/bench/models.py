"""The models that are measured, with random rows for them.

| name | parameters | gradients are |
|---|---|---|
| resnet20 | 0.27 M | many and small; much to compute for each byte (He et al. 2016, CIFAR-10) |
| mlp | 10.5 M | few and large; little to compute for each byte |
| embedding | 12.8 M | sparse: of 200,000 rows, a step touches eight for each row of its batch |
| transformer | 0.79 M | in between: one encoder block (Vaswani et al. 2017) |

All tell ten classes apart. A model is built of a Keras, which is an argument: the legacy tf_keras
builds the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from dtk.nests import Array

if TYPE_CHECKING:
    import keras

_CLASSES = 10
_WORDS = 200_000

# Of the Keras that a model is built of.
Model: TypeAlias = "keras.Model"
Symbolic: TypeAlias = "keras.KerasTensor"


class Problem(NamedTuple):
    """A model and what it reads."""

    build: Callable[[ModuleType], Model]  # makes the model, of a Keras
    # from a random generator and a number, so many rows of input
    rows: Callable[[np.random.Generator, int], Array]

    def compiled(self, keras: ModuleType, slots: bool = False) -> Model:
        """Build the model with equal weights every time, ready to train with `keras`.

        Plain SGD is the least an optimizer can do, and keeps an embedding's gradient sparse: what
        is measured is everything else. With slots, it is Adam.
        """
        keras.utils.set_random_seed(1)
        model = self.build(keras)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(1e-4) if slots else keras.optimizers.SGD(0.01)
        model.compile(optimizer, loss)
        return model

    def data(self, count: int) -> tuple[Array, Array]:
        """Return rows and their labels, the same every time."""
        random = np.random.default_rng(0)
        return self.rows(random, count), random.integers(0, _CLASSES, count)


def resnet20(keras: ModuleType) -> Model:
    """Return a ResNet of 20 layers for CIFAR-10 (He et al. 2016).

    Where the image shrinks, shortcuts pad channels with zeros (option A).
    """
    inputs = keras.Input((32, 32, 3))
    x = _conv(keras, inputs, 16)
    for filters in (16, 32, 64):
        for block in range(3):
            stride = 2 if filters > 16 and block == 0 else 1
            y = _conv(keras, x, filters, stride)
            y = _conv(keras, y, filters, activation=None)
            if stride == 2:
                x = keras.layers.AveragePooling2D(2)(x)
                x = keras.layers.Concatenate()([x, keras.layers.Rescaling(0.0)(x)])
            x = keras.layers.ReLU()(keras.layers.Add()([x, y]))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(_CLASSES)(x))


def _conv(
    keras: ModuleType, x: Symbolic, filters: int, strides: int = 1, activation: str | None = "relu"
) -> Symbolic:
    x = keras.layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
    x = keras.layers.BatchNormalization()(x)
    return keras.layers.Activation(activation)(x)


def mlp(keras: ModuleType) -> Model:
    """Return a model of three hidden layers of 2048 units."""
    hidden = [keras.layers.Dense(2048, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((1024,)), *hidden, keras.layers.Dense(_CLASSES)])


def embedding(keras: ModuleType) -> Model:
    """Return a model of the mean of eight rows of a table."""
    return keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            keras.layers.Embedding(_WORDS, 64),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(_CLASSES),
        ]
    )


def transformer(keras: ModuleType) -> Model:
    """Return one encoder block of width 256 and eight heads, over 32 positions."""
    x = inputs = keras.Input((32, 256))
    attended = keras.layers.MultiHeadAttention(num_heads=8, key_dim=32)(x, x)
    x = keras.layers.LayerNormalization()(keras.layers.Add()([x, attended]))
    fed = keras.layers.Dense(256)(keras.layers.Dense(1024, activation="gelu")(x))
    x = keras.layers.LayerNormalization()(keras.layers.Add()([x, fed]))
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(_CLASSES)(x))


def _normal(*shape: int) -> Callable[[np.random.Generator, int], Array]:
    return lambda random, count: random.standard_normal((count, *shape), dtype="float32")


PROBLEMS = {
    "resnet20": Problem(resnet20, _normal(32, 32, 3)),
    "mlp": Problem(mlp, _normal(1024)),
    "embedding": Problem(
        embedding, lambda random, count: random.integers(0, _WORDS, (count, 8), "int32")
    ),
    "transformer": Problem(transformer, _normal(32, 256)),
}
