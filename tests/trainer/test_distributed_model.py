"""A model that a strategy has taken over is to Keras, and to files, the model of the script."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from dtk.strategies import AllReduceStrategy
from dtk.trainer.distributed_model import DistributedModel, trainer_of

pytestmark = pytest.mark.fast
X, Y = np.ones((8, 2), "float32"), np.ones((8, 3), "float32")


@keras.saving.register_keras_serializable("tests")
class Own(keras.Model):
    def __init__(self, calls=(), **kwargs):
        super().__init__(**kwargs)
        self.calls = list(calls)
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def compile(self, *args, **kwargs):
        self.calls.append("compile")
        super().compile(*args, **kwargs)

    def fit(self, *args, **kwargs):
        self.calls.append("fit")
        return super().fit(*args, **kwargs)

    def compute_loss(self, *args, **kwargs):
        self.calls.append("compute_loss")
        return super().compute_loss(*args, **kwargs)


class Registered(type):
    names = []

    def __new__(mcs, name, bases, namespace):
        mcs.names.append(name)
        return super().__new__(mcs, name, bases, namespace)


class Told(keras.Sequential, metaclass=Registered):
    """A script's, which counts its subclasses, and pickles itself."""

    def __init_subclass__(cls, /, kind, **kwargs):
        raise AssertionError("a class was derived")

    def __reduce__(self):
        return super().__reduce__()


class Layer(TensorFlowTrainer, keras.layers.Dense):
    """No `keras.Model`, as in Keras's own tests: the made class lost its call."""

    def __init__(self):
        keras.layers.Dense.__init__(self, 3)
        TensorFlowTrainer.__init__(self)


def functional():
    inputs = keras.Input((2,))
    return keras.Model(inputs, keras.layers.Dense(3)(inputs))


MODELS = {
    "sequential": lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)]),
    "lazy": lambda: keras.Sequential([keras.layers.Dense(3)]),
    "functional": functional,
}
TOLD = {"told": lambda: Told([keras.Input((2,)), keras.layers.Dense(3)])}


def trained(make):
    strategy = AllReduceStrategy()
    with strategy.scope():
        model = make()
        model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_copies_are_of_the_script_s_class(name):
    model = trained(MODELS[name])
    assert isinstance(model, DistributedModel) and type(model) is not model.__class__
    assert model.__class__ in (keras.Sequential, type(functional()))
    answer = model.predict(X, verbose=0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is model.__class__ and trainer_of(other) is None
        np.testing.assert_array_equal(other.predict(X, verbose=0), answer)
    assert type(keras.models.clone_model(model)) is model.__class__


def test_files_name_no_class_of_dtk_s_and_are_read_without_it(tmp_path):
    for name, make in MODELS.items():
        model = trained(make)
        model.save(tmp_path / f"{name}.keras")
        with zipfile.ZipFile(tmp_path / f"{name}.keras") as saved:
            config = json.loads(saved.read("config.json"))
        assert "dtk" not in json.dumps(config)
        assert config["class_name"] == model.__class__.__name__
    code = (
        "import keras, pathlib, sys\n"
        "for file in pathlib.Path(sys.argv[1]).glob('*.keras'):\n"
        "    keras.models.load_model(file)\n"
        "assert not any(name.partition('.')[0] == 'dtk' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=100)


def test_a_layer_with_the_trainer_of_keras_trains():
    model = trained(Layer)
    assert trainer_of(model) is not None and model.predict(X, verbose=0).shape == (8, 3)


def test_what_the_script_overrides_is_called_once():
    model = trained(Own)
    assert model.calls[:2] == ["compile", "fit"]
    assert model.calls.count("compute_loss") <= 2  # to build the metrics, and to trace the step
    model.compile("adam", "mae")
    assert model.calls.count("compile") == 2 and trainer_of(model) is not None


def test_a_script_s_class_learns_nothing_of_the_class_that_is_made():
    model = trained(TOLD["told"])
    assert Registered.names == ["Told"] and isinstance(type(model), Registered)
    with keras.saving.custom_object_scope({"Told": Told}):
        assert type(pickle.loads(pickle.dumps(model))) is Told


def test_a_loss_that_the_script_has_set_on_the_object_is_computed():
    def twice(x, y, y_pred, sample_weight=None, training=True):
        return 2.0 * keras.ops.mean(keras.ops.square(y - y_pred))

    def make():
        model = MODELS["sequential"]()
        model.compute_loss = twice
        return model

    keras.utils.set_random_seed(1)
    model = trained(make)
    keras.utils.set_random_seed(1)
    plain = MODELS["sequential"]()
    plain.compile(keras.optimizers.SGD(0.02), "mse")
    plain.fit(X, Y, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], plain.get_weights()[0], rtol=1e-6)
