"""Weights of a trained model: equal on all ranks, and in 8 bits by Keras's own `quantize`."""

from __future__ import annotations

import dataclasses
import inspect
import warnings

import keras

from dtk.cluster.detect import detect
from dtk.communicators import LocalCommunicator
from dtk.communicators.base import Communicator
from dtk.compat import keras_models
from dtk.errors import NotDistributedError, at_rank
from dtk.nests import Function
from dtk.strategies.dtk_strategy import DtkStrategy
from dtk.strategies.parameter_server import ParameterServerStrategy
from dtk.trainer import distributed_model, model_files
from dtk.trainer.ranks.rank_checks import compare


@dataclasses.dataclass(frozen=True)
class Quantized:
    """What `quantize` did to a model.

    Attributes:
        layers: Names of the layers that were quantised.
        left: Names of those with weights that were left as they are: Keras quantises no such layer.
        bytes_before: Of all weights.
        bytes_after: Of all weights.
    """

    layers: tuple[str, ...]
    left: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        before, after = self.bytes_before / 1e3, self.bytes_after / 1e3
        return (
            f"{len(self.layers)} of {len(self.layers) + len(self.left)} layers with weights "
            f"quantised, {before:.0f} -> {after:.0f} kB of weights"
        )


def quantize(
    model: keras.Model,
    mode: str = "int8",
    *,
    filters: str | list[str] | Function[bool] | None = None,
    strategy: DtkStrategy | Communicator | None = None,
) -> Quantized:
    """Quantise a trained model's weights in place, and check that all ranks hold the same.

    It is `model.quantize(mode)`, which may be called by itself as well. Keras 3.15 quantises
    Dense, EinsumDense and Embedding layers; convolutions stay as they are, which Keras says in one
    warning for each layer, and this in what it returns. The model then predicts and evaluates under
    its strategy as before. What is quantised is not trained any more.

    Every rank calls this.

    Args:
        model: A built model.
        mode: "int8", or another of `keras.Model.quantize` that needs no data.
        filters: Which layers, as of `keras.Model.quantize`; None is all that can be.
        strategy: The ranks; None takes the model's own.

    Returns:
        What was quantised, and what was not.

    Raises:
        ValueError: No layer can be quantised, the model is quantised already, or has no weights.
        NotImplementedError: The weights are on parameter servers.
        DisagreementError: Ranks hold different weights, before or after.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(100)])
        >>> print(quantize(model))
        1 of 1 layers with weights quantised, 26 -> 7 kB of weights
    """
    ranks = ranks_of(model, strategy)
    if isinstance(strategy_of(model), ParameterServerStrategy):
        raise NotImplementedError(
            f"model {model.name!r} has its weights on parameter servers; save it, and quantise "
            "what keras.saving.load_model(path) returns in a job without them"
        )
    check_ready(model, ranks)
    layers, already = _layers_of(model), quantized_layers(model)
    if already:
        message = (
            f"{len(already)} layers of model {model.name!r} are quantised already, such as "
            f"{already[0].name!r}; load the model as it was before, and quantise that once"
        )
        raise ValueError(at_rank(ranks.rank, message))
    size = _bytes_of(model)
    with warnings.catch_warnings():
        # One for each layer, of those without weights, too; what was left is returned.
        warnings.filterwarnings("ignore", r"Layer \w+ does not have a `quantize` method")
        # Keras 3.16 counts them, in a warning and in a report that it prints.
        warnings.filterwarnings("ignore", r"`model.quantize\(\)`: \d+ layer")
        silent = "verbose" in inspect.signature(model.quantize).parameters
        model.quantize(mode, filters=filters, **({"verbose": False} if silent else {}))
    done = tuple(layer.name for layer in layers if layer.quantization_mode is not None)
    left = tuple(layer.name for layer in layers if layer.quantization_mode is None)
    if not done:
        kinds = sorted({type(layer).__name__ for layer in layers})
        message = (
            f"Keras quantises no layer of model {model.name!r}, whose weights are in "
            f"{', '.join(kinds)}: it knows Dense, EinsumDense and Embedding"
            f"{'' if filters is None else f', and was given filters={filters!r}'}. For "
            "convolutions use LiteRT's: dtk.inference.export(model, 'model.tflite', 'litert', "
            "optimizations=[tf.lite.Optimize.DEFAULT])"
        )
        raise ValueError(at_rank(ranks.rank, message))
    check_ready(model, ranks)
    return Quantized(done, left, size, _bytes_of(model))


def quantized_layers(model: keras.Model) -> list[keras.Layer]:
    return [layer for layer in _layers_of(model) if layer.quantization_mode is not None]


def _layers_of(model: keras.Model) -> list[keras.Layer]:
    """Return the innermost layers that hold weights, each once."""
    layers = keras_models.layers_of(model)
    return [layer for layer in layers if layer.weights and len(keras_models.layers_of(layer)) == 1]


def _bytes_of(model: keras.Model) -> int:
    """Return how many bytes a model's weights have in memory."""
    values = [variable.value for variable in model.weights]
    return sum(value.dtype.size * int(value.shape.num_elements()) for value in values)


def strategy_of(model: keras.Model) -> DtkStrategy | None:
    """Return the strategy a model was built or compiled under; None if it was none of dtk's."""
    trainer = distributed_model.trainer_of(model)
    owner = keras_models.owner_of(model) if trainer is None else trainer.strategy
    return owner if isinstance(owner, DtkStrategy) else None


def ranks_of(model: keras.Model, owner: DtkStrategy | Communicator | None) -> Communicator:
    """Return the ranks that share work on a model."""
    owner = strategy_of(model) if owner is None else owner
    if isinstance(owner, DtkStrategy):
        return owner.communicator
    if isinstance(owner, Communicator):
        return owner
    if owner is not None:
        raise TypeError(
            f"strategy={owner!r} is none of dtk's; give what dtk.auto_strategy() returned"
        )
    place = detect()
    if place.size > 1 and place.role in ("worker", "chief"):
        message = (
            f"model {model.name!r} belongs to no strategy, in a job of {place.size} processes: "
            "each would do all of the work. Give strategy=..., or load the model inside "
            "strategy.scope()"
        )
        raise NotDistributedError(at_rank(place.rank, message))
    return LocalCommunicator()


def check_ready(model: keras.Model, communicator: Communicator) -> str:
    """Finish pending updates, and return a hash of the weights, which all ranks must share."""
    if not model.built:
        message = (
            f"model {model.name!r} has no weights yet: fit it, load it from a file, or call it "
            "on one batch first"
        )
        raise ValueError(at_rank(communicator.rank, message))
    trainer = distributed_model.trainer_of(model)
    if trainer is not None:
        trainer.flush()
    weights_hash = model_files.hash_of(model)
    compare(
        [("model's weights (their hash)", weights_hash)],
        communicator,
        "load the same file on every rank, or train the model in strategy.scope()",
    )
    return weights_hash
