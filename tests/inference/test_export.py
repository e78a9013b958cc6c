"""Exported from rank 0, and what was exported computes what the model does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.inference import ExportError, export, latency, load, size_of
from dtk.version import pip_install

from inference import bodies
from support import bodies as worlds

PATHS = {"tf_saved_model": "model", "litert": "model.tflite", "keras": "model.keras"}


def assert_close(found, wanted):
    found, wanted = keras.tree.flatten(found), keras.tree.flatten(wanted)
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-4, 1e-5)


def small(layers=(), units=4, name=None):
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(units)], name=name)


def flat_outputs():
    """No format but Keras's takes outputs nested deeper than a dict."""
    nested = bodies.model()
    outputs = {"logits": nested.output["logits"], "first": nested.output["parts"][0]}
    return keras.Model(nested.input, outputs)


def by_rank_0(folder):
    """An export by rank 0; then a failure of rank 0, and a model that ranks differ in."""
    strategy = worlds.strategy()
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).random((16, 6)).astype("float32")
    with strategy.scope():
        model = small([keras.layers.BatchNormalization(synchronized=True)])
        other = small()
    path = export(model, f"{folder}/new/model.keras", "keras")  # a folder that only rank 0 makes
    output, said = load(path)(x), []
    other.layers[0].bias.assign(np.full(4, strategy.rank))
    # what rank 0 alone finds out, and what all do
    for model_, more in ((model, {"tolerance": -1.0}), (other, {})):
        with pytest.raises(RuntimeError) as raised:
            export(model_, f"{folder}/model.keras", "keras", **more)
        said.append("\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])]))
    return output, model(x).numpy(), said


@pytest.mark.parametrize("backend, size", [("collective", 2)])
def test_rank_0_exports_and_all_ranks_fail_together(world, backend, size, tmp_path):
    results = world(backend, size).run(by_rank_0, str(tmp_path))
    for rank, (found, wanted, said) in enumerate(results):
        assert_close(found, wanted)
        far, differ = said
        assert "differs by" in far and "nothing was written" in far
        assert rank == 0 or "rank 1: this happened on rank 0" in far
        assert "ranks disagree on the model's weights" in differ
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new"]
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["model.keras"]


@pytest.mark.full_but("keras")
@pytest.mark.parametrize("format", PATHS)
def test_several_inputs_and_outputs(format, tmp_path):
    model = flat_outputs()
    path = export(model, tmp_path / PATHS[format], format)
    x = {name: rows[:5] for name, rows in bodies.data().items()}
    assert_close(load(path)(x), model(x))
    assert size_of(path) > 1000


@pytest.mark.full("a cheaper test holds its rule")
def test_what_cannot_be_converted_is_named(tmp_path):
    with pytest.raises(ExportError, match="Got a non-Tensor value .* for key 'parts'"):
        export(bodies.model(), tmp_path / "model")
    assert not [*tmp_path.iterdir()]


@pytest.mark.full("a cheaper test holds its rule")
def test_an_artifact_that_computes_something_else_is_not_left_there(tmp_path):
    """Breaks as a file of eight bits that nobody has ever run."""
    keras.utils.set_random_seed(1)
    model = small()
    before = export(model, tmp_path / "model.tflite", "litert").read_bytes()
    with pytest.raises(ExportError, match=r"differs by .* of the largest output, more than 1e-09"):
        export(
            model, tmp_path / "model.tflite", "litert", tolerance=1e-9,
            optimizations=[tf.lite.Optimize.DEFAULT], representative_dataset=calibration,
        )  # fmt: skip
    assert (tmp_path / "model.tflite").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.tflite"]


def calibration():
    for _ in range(4):
        yield [np.random.default_rng(0).random((1, 6)).astype("float32")]


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)


@pytest.mark.full("a cheaper test holds its rule")
def test_a_model_that_does_not_say_its_inputs_takes_a_sample(tmp_path):
    model, x = Subclassed(), np.ones((3, 4), "float32")
    model(x)
    with pytest.raises(ValueError, match="give sample="):
        export(model, tmp_path / "model")
    assert_close(load(export(model, tmp_path / "model", sample=x))(x), model(x))


@pytest.mark.parametrize(
    "name, format, said",
    [
        ("model.onnx", "litert", "end with .tflite; give 'model.tflite'"),
        ("model.tflite", "tf_saved_model", "give 'model', or another format"),
        ("model", "keras", "give 'model.keras'"),
        ("model", "openvino", "known are keras, litert, onnx, tf_saved_model"),
    ],
)
def test_names_and_formats_that_do_not_fit(name, format, said):
    with pytest.raises(ValueError, match=said):
        export(small(), name, format)


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    with pytest.raises(ImportError, match=re.escape(pip_install("export"))):
        export(small(), tmp_path / "model.onnx", "onnx")
    (tmp_path / "model.onnx").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=re.escape(pip_install("export"))):
        load(tmp_path / "model.onnx")
    with pytest.raises(FileNotFoundError, match="is not there"):
        load(tmp_path / "other.onnx")
    Path(tmp_path, "model.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="ends with '.pt'"):
        load(tmp_path / "model.pt")


def test_onnx(tmp_path):
    """Keras leaves a file with operations nobody knows, and says nothing but a line in the log."""
    model = flat_outputs()
    path = export(model, tmp_path / "model.onnx", "onnx")
    x = {name: rows[:5] for name, rows in bodies.data().items()}
    assert_close(load(path)(x), model(x))
    exact = small([keras.layers.Dense(3, activation="gelu")])
    with pytest.raises(ExportError, match=r"Erfc.*gelu with approximate=True"):
        export(exact, tmp_path / "exact.onnx", "onnx")
    assert not (tmp_path / "exact.onnx").exists()


def test_quartiles():
    with pytest.raises(ValueError, match="calls=1"):
        latency(lambda: None, calls=1)
    calls = []
    found = latency(lambda: calls.append(0), calls=8, warm_up=3)
    assert len(calls) == 11 and found.calls == 8
    assert found.low <= found.median <= found.high
