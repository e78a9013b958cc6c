"""Small networks beside the models of `dtk bench`: where steps are short, what is added shows."""

from dtk.bench import models
from dtk.bench.models import Problem


def dense(keras):
    """Steps of about a millisecond: the worst case."""
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers])


def conv(keras):
    """Steps of some ten milliseconds."""
    layers = [keras.layers.Conv2D(64, 3, padding="same", activation="relu") for _ in range(3)]
    head = [keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers, *head])


def normed(keras):
    """A convolution and its norm: to see quickly that a row works."""
    layers = [keras.layers.Conv2D(8, 3), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    head = [keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers, *head])


def _images(random, count):
    return random.standard_normal((count, 8, 8, 1), dtype="float32")


SMALL = {build.__name__: Problem(build, _images) for build in (dense, conv, normed)}
# Those that read floats, which can be decoded.
LARGE = {name: models.PROBLEMS[name] for name in ("resnet20", "mlp", "transformer")}
PROBLEMS = {**models.PROBLEMS, **SMALL}
