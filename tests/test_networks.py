"""The networks of examples/cifar10 are CNTK's, and train on two workers as on one."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import types
from pathlib import Path

import keras
import numpy as np
import pytest

from dtk import schedules
from dtk.communicators.local import LocalCommunicator

from support import bodies

CIFAR10 = Path(__file__).resolve().parents[1] / "examples" / "cifar10"


@functools.cache
def module(name):
    """A file beside the script; tests have modules of the same names."""
    spec = importlib.util.spec_from_file_location(f"cifar10_{name}", CIFAR10 / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def conv(size, before, filters):
    """Weights of a convolution without bias, and of its normalization."""
    return size * size * before * filters + 2 * filters


def resnet(blocks):
    """He et al. 2016 with projections: 0.27 M parameters of 20 layers, 1.7 M of 110."""
    total, before = conv(3, 3, 16), 16
    for filters in (16, 32, 64):
        total += conv(3, before, filters) + (2 * blocks - 1) * conv(3, filters, filters)
        total += conv(1, before, filters) if before != filters else 0
        before = filters
    return total + 64 * 10 + 10


# By hand. CNTK prints of its ConvNet "Training 1195594 parameters in 14 parameter tensors".
COUNTS = {
    "convnet": (1_195_594, 14),
    "vgg9": (38_720 + 138_432 + 258_304 + 1_180_672 + 1_049_600 + 10_250, 18),
    "resnet20": (resnet(3), 65),
    "resnet110": (resnet(18), 335),
    # five convolutions, six blocks, and the classes of 512 channels
    "bn-inception": (
        sum(conv(*of) for of in [(3, 3, 32), (3, 32, 32), (3, 32, 32), (1, 32, 32), (3, 32, 64)])
        + (51_424 + 93_472 + 158_592 + 282_176 + 1_352_704 + 674_400)
        + 5_130,
        131,
    ),
}


@pytest.mark.full_for("bn-inception", "resnet110")
@pytest.mark.parametrize("name", COUNTS)
def test_networks_have_the_parameters_counted_by_hand(name):
    networks = module("networks")
    model = networks.NETWORKS[name](networks.Style(l2=0.5))
    found = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    assert (found, len(model.trainable_weights)) == COUNTS[name]
    assert model.output_shape == (None, 10)
    assert name == model.name
    assert len(model.losses) == len(model.trainable_weights), "CNTK regularizes all parameters"
    # l2 w is the gradient: half the square
    biggest = max(model.trainable_weights, key=lambda weight: np.prod(weight.shape))
    wanted = 0.25 * float(keras.ops.sum(biggest**2))
    assert any(float(loss) == pytest.approx(wanted, rel=1e-4) for loss in model.losses)


def test_resnets_are_of_the_size_the_paper_says():
    assert round(resnet(3) / 1e6, 2) == 0.27
    assert round(resnet(18) / 1e6, 1) == 1.7


def test_recipes_are_those_of_the_papers_in_keras_numbers():
    recipes = module("recipes")
    for name in ("resnet20", "resnet110"):
        recipe = recipes.RECIPES[name]
        rates = [
            schedules.learning_rate_from_sample_rate(rate, recipe.minibatch, 0.9)
            for _, rate in recipe.rates[-3:]
        ]
        assert rates == pytest.approx([0.1, 0.01, 0.001])
        momentum = schedules.momentum_from_time_constant(recipe.time_constant, recipe.minibatch)
        assert momentum == pytest.approx(0.9)
    short = recipes.RECIPES["resnet20"].stretched(8)
    assert [epochs for epochs, _ in short.rates] == [4, 2, 2]


def test_workers_with_steps_of_their_own_move_as_far_for_each_image():
    recipes = module("recipes")
    recipe = recipes.RECIPES["resnet20"]
    optimizer, callbacks = recipes.sgd(recipe, 128, 1280, workers=4, blocks=True)
    assert callbacks == []
    # 32 rows of a worker: a rate per image of 1/128, at momentum exp(-32 / tau) of unit gain
    momentum = 0.9 ** (32 / 128)
    assert optimizer.momentum == pytest.approx(momentum)
    assert float(optimizer.learning_rate) == pytest.approx(32 / 128 * (1 - momentum))


def test_images_are_moved_by_seeds_and_only_flipped_where_that_keeps_their_meaning():
    data = module("data")
    digits = data.load_digits()
    assert [x.shape for x in (*digits.train, *digits.test)] == [
        (1437, 32, 32, 3),
        (1437,),
        (360, 32, 32, 3),
        (360,),
    ]
    few = digits._replace(train=tuple(part[:8] for part in digits.train))
    (first, labels), (again, same) = (next(iter(data.training_set(few, 8))) for _ in range(2))
    np.testing.assert_array_equal(first, again, "every rank makes the same batches")
    np.testing.assert_array_equal(labels, same)
    mean = data.mean_image(few)
    for image, label in zip(first.numpy() + mean, labels.numpy(), strict=True):
        sources = few.train[0][few.train[1] == label].astype("float32")
        moved = [
            np.pad(source, [(4, 4), (4, 4), (0, 0)])[i : i + 32, j : j + 32]
            for source in sources
            for i in range(9)
            for j in range(9)
        ]
        assert min(np.abs(image - one).max() for one in moved) < 1e-3


def test_made_images_are_the_same_for_all_ranks_and_their_classes_of_one_size():
    data = module("data")
    taught = data.make_taught(600)
    assert [x.shape for x in (*taught.train, *taught.test)] == [
        (600, 8, 8, 3),
        (600,),
        (1000, 8, 8, 3),
        (1000,),
    ]
    sizes = np.bincount(np.concatenate([taught.train[1], taught.test[1]]))
    assert sizes.tolist() == [160] * 10
    again = data.make_taught(600)
    np.testing.assert_array_equal(taught.train[0], again.train[0], "every rank makes the same")
    networks = module("networks")
    assert networks.NETWORKS["resnet20"](networks.Style(size=8)).input_shape == (None, 8, 8, 3)


def test_cifar10_is_what_keras_reads(monkeypatch):
    data = module("data")
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (6, 32, 32, 3), "uint8"), random.integers(0, 10, (6, 1))
    monkeypatch.setattr(keras.datasets.cifar10, "load_data", lambda: ((x, y), (x[:2], y[:2])))
    alone = types.SimpleNamespace(is_chief=True, world=LocalCommunicator())
    found = data.load("cifar10", alone, images=4)
    np.testing.assert_array_equal(found.train[0], x[:4])
    np.testing.assert_array_equal(found.train[1], y[:4, 0])
    assert (found.title, found.background, found.flips) == ("CIFAR-10", 128, True)
    assert len(found.test[0]) == 2
    (images, _) = next(iter(data.test_set(found, 8)))
    np.testing.assert_allclose(images, x[:2] - x[:4].mean(axis=0), atol=1e-3)


def fit_once(name, plain=False):
    """A step of a network on 9 rows, then its weights; dropout would draw other masks."""
    networks, data = module("networks"), module("data")
    images = data.make_synthetic(9)
    with contextlib.nullcontext() if plain else bodies.strategy().scope():
        keras.utils.set_random_seed(4)
        model = networks.NETWORKS[name](networks.Style(l2=1e-3, dropout=0.0))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss)
    model.fit(data.training_set(images, 9), shuffle=False, verbose=0)
    return bodies.flat(model.get_weights())


@pytest.mark.full("what networks are made of is counted without training them")
@pytest.mark.timeout(1200)  # graphs of 110 layers, on a machine that others use
@pytest.mark.worlds(("collective", 2))
@pytest.mark.parametrize("name", COUNTS)
def test_a_step_of_two_workers_is_that_of_one(pool, name):
    found, alone = pool.run(fit_once, name, timeout=900), fit_once(name, plain=True)
    np.testing.assert_array_equal(found[0], found[1])
    assert np.linalg.norm(found[0] - alone) <= 1e-5 * np.linalg.norm(alone)
