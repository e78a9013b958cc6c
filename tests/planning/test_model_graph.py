"""What is read of a Keras model, and that what is said to be sent is what `dtk.layers` sends."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.cli.planner import load
from dtk.communicators.local import NullCommunicator
from dtk.layers import parallelize
from dtk.planning import load_plan
from dtk.planning.inputs import Cluster, Link, PlanError
from dtk.planning.model import graph
from dtk.planning.model.layer_costs import LayerCosts, RankGrid, Rates, Workload
from dtk.planning.model.layer_times import MeasuredRates
from dtk.planning.model.plans import ModelPlan
from dtk.planning.model.search import choose, judge

layers = keras.layers
RATES = Rates(flops=1e10, nbytes=1e9)


def convolutions():
    image = keras.Input((8, 8, 4), name="image")
    first = layers.Conv2D(6, 3, padding="same", name="first")(image)
    normed = layers.ReLU(name="relu")(layers.BatchNormalization(name="norm")(first))
    second = layers.Conv2D(6, 3, padding="same", name="second")(normed)
    added = layers.Add(name="add")([second, normed])
    pooled = layers.MaxPooling2D(name="pool")(added)
    hidden = layers.Dense(8, "relu", name="hidden")(layers.Flatten(name="flat")(pooled))
    return keras.Model(image, layers.Dense(2, name="head")(hidden))


def workload_of(model, batch=4, **settings):
    operators, outputs = graph.read(model)
    return Workload(operators, outputs, batch, RATES, Cluster(Link(), per_host=4), **settings)


def test_operators_are_the_model_s_layers_with_their_weights_and_work():
    model = convolutions()
    found = {one.name: one for one in graph.read(model)[0]}
    assert set(found) == {layer.name for layer in model.layers}
    assert sum(one.weights for one in found.values()) == sum(
        np.prod(v.shape) for v in model.trainable_variables
    )
    assert found["norm"].fixed == 12
    first = found["first"]
    assert first.flops == 2 * 8 * 8 * 6 * 9 * 4
    assert (first.kernel, first.weights, first.tensors) == (216, 222, 2)
    assert first.limits == {"output": 6, "input": 4, "rows": 8, "columns": 8}
    assert not first.differentiated and found["second"].differentiated
    assert first.halos["rows"] == (1, 1) and found["pool"].halos["rows"] == (0, 0)
    assert found["relu"].follows and not found["norm"].follows
    assert found["flat"].whole_because == "dtk divides no Flatten"


HALOS = {
    (3, 1, "same"): (1, 1),
    (3, 2, "same"): (0, 1),  # TensorFlow pads an even height at stride 2 at its end only
    (5, 1, "same"): (2, 2),
    (3, 1, "valid"): (0, 2),
}


@pytest.mark.parametrize("made", HALOS)
def test_halos_of_an_inner_rank_are_those_of_the_layers_of_dtk(made):
    conv = layers.Conv2D(2, *made)
    up = layers.UpSampling2D(2, interpolation="bilinear")
    _, one, smooth = graph.read(keras.Sequential([keras.Input((8, 8, 1)), conv, up]))[0]
    assert (one.halos["rows"], smooth.halos["rows"]) == (HALOS[made], (1, 1))


def test_what_parallelize_refuses_stays_whole():
    refused = layers.Conv2D(4, 3, groups=2, padding="same", activity_regularizer="l2")
    first = layers.Conv2D(4, 3, data_format="channels_first")
    for layer in (refused, first, layers.UpSampling2D(2, interpolation="bicubic")):
        _, one = graph.read(keras.Sequential([keras.Input((8, 8, 4)), layer]))[0]
        assert "rows" not in one.limits


def test_layers_of_several_calls_outputs_and_operations_are_read():
    x = keras.Input((6,), name="x")
    shared = layers.Dense(6, name="shared")
    once, twice = shared(x), shared(shared(x))
    doubled = twice * 2.0
    model = keras.Model(x, {"b": layers.Concatenate(name="both")([once, doubled]), "a": once})
    found, outputs = graph.read(model)
    assert [one.name for one in found].count("shared") == 3
    assert sum(one.weights for one in found) == 42
    assert all(one.splits(2) == ("whole",) for one in found if one.name == "shared")
    assert [found[one].name for one in outputs] == ["shared", "both"]
    (product,) = [one for one in found if one.name.startswith("multiply")]
    assert product.whole_because == "an operation of keras.ops is no layer"


PLANS = {
    "channels": {"first": "output", "second": "input", "hidden": "output", "head": "input"},
    "rows": dict.fromkeys(("first", "norm", "second", "pool"), "rows"),
    "a layer between": {"first": "columns", "norm": "columns", "hidden": "input"},
}


@pytest.mark.parametrize("name", PLANS)
def test_bytes_are_those_that_a_step_really_sends(name):
    """Of two ranks, with whom an all-reduce moves as many bytes as it is handed."""
    model, plan = convolutions(), PLANS[name]
    workload = workload_of(model)
    costs_of = LayerCosts(workload, RankGrid(1, 2))
    wanted = [plan.get(one.name, "whole") for one in workload.operators]
    expected = judge(costs_of, wanted).plan.sent
    communicator = NullCommunicator(0, 2)
    divided = parallelize(model, plan, communicator)
    before = communicator.bytes_sent
    with tf.GradientTape() as tape:
        result = tf.reduce_sum(divided(tf.ones([4, 8, 8, 4]), training=True) ** 2)
    tape.gradient(result, [v.value for v in divided.trainable_variables])
    assert communicator.bytes_sent - before == expected


def test_a_plan_is_handed_to_parallelize(tmp_path):
    model = convolutions()
    workload = dataclasses.replace(workload_of(model, batch=64), computing=Rates(1e7, 1e7))
    choice = choose(workload, 2)
    split = next(one for one in choice.candidates if "layers: " in one.how)
    file = tmp_path / "plan.json"
    file.write_text(split.plan.dumps())
    plan = load_plan(file)
    assert plan == split.plan and plan.model_parallel == 2 and plan.workers == 2
    assert plan.layers and "relu" not in plan.layers
    divided = parallelize(model, plan.layers, NullCommunicator(0, 2))
    sizes = {name: divided.get_layer(name).split for name in plan.layers}
    assert sizes == dict(plan.layers)


def test_stages_compute_what_the_model_does(tmp_path):
    model = convolutions()
    workload = workload_of(model)
    choice = choose(workload, 2)
    staged = next(one for one in choice.candidates if "stages" in one.how).plan
    stages = staged.stages(model)
    assert len(stages) == 2 and all(stage.trainable_variables for stage in stages)
    x = np.random.default_rng(0).normal(size=(3, 8, 8, 4)).astype("float32")
    np.testing.assert_allclose(stages[1](stages[0](x)), model(x), rtol=1e-6)
    with pytest.raises(PlanError, match=r"has no layers \['gone'\]"):
        dataclasses.replace(staged, borders=("gone",)).stages(model)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"dtk plan": 1}', '{"dtk plan --model": 2}', '{"dtk plan --model": 1}']
)
def test_what_is_no_plan_is_refused(tmp_path, text):
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(PlanError, match="plan.json: not what `dtk plan --model"):
        load_plan(file)
    with pytest.raises(PlanError, match="No such file"):
        load_plan(tmp_path / "other.json")
    assert 'load_plan("p.json")' in ModelPlan(1, 1, 8).script("p.json")


def test_models_that_do_not_tell_are_refused(tmp_path):
    class Own(keras.Model):
        pass

    with pytest.raises(PlanError, match="is a Own: only functional and Sequential"):
        graph.read(Own())
    with pytest.raises(PlanError, match="does not know its input; begin it with keras.Input"):
        graph.read(keras.Sequential([layers.Dense(2)]))
    unknown = keras.Sequential([keras.Input((None, 4)), layers.Dense(2)])
    with pytest.raises(PlanError, match="all but the batch must be known"):
        graph.read(unknown)
    with pytest.raises(PlanError, match="no such file; write it with model.save"):
        load(str(tmp_path / "model.keras"))
    (tmp_path / "bad.keras").write_text("no model")
    with pytest.raises(PlanError, match="Keras cannot load it"):
        load(str(tmp_path / "bad.keras"))


def test_layers_are_measured_once_at_the_shapes_of_a_rank():
    told = []
    x = keras.Input((8, 8, 2), name="x")
    first = layers.Conv2D(4, 3, padding="same", name="a")(x)
    model = keras.Model(x, layers.Conv2D(4, 3, padding="same", name="b")(first))
    operators, _ = graph.read(model)
    computing = MeasuredRates(model, operators, 4, RATES, told.append)
    assert told == ["a whole / 1, 4 rows", "b whole / 1, 4 rows", "the whole model"]
    half = computing.seconds(operators[2], 4, ("rows", 2))
    assert told[-1] == "b rows / 2, 4 rows" and half >= 0
    assert computing.seconds(operators[2], 4, ("rows", 2)) == half and len(told) == 4
    known = [computing.seconds(operators[1], rows) for rows in (1, 2, 4)]
    assert min(known) <= known[1] <= max(known)  # interpolated
    assert computing.factor > 0 and 0 <= computing.spread < 10
