"""Updates in one pass are Keras's own, bit for bit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.cluster.variables import FUSED_ADAM
from dtk.compat import fused_kernels

SHAPES = ((7, 5), (64, 33), (129,), ())
ONE_OP = {"ResourceApplyGradientDescent", "ResourceApplyKerasMomentum"}


def trained(make, prepare=lambda optimizer: None, dtype="float32", shapes=SHAPES, steps=7):
    """What the variables and those of the optimizer are after some steps, and the last graph."""
    random = np.random.default_rng(3)
    variables = [
        keras.Variable(random.normal(size=shape), dtype=dtype, name=f"v{i}")
        for i, shape in enumerate(shapes)
    ]
    optimizer = make()
    optimizer.build(variables)
    prepare(optimizer)
    graphs = []

    @tf.function(autograph=False)
    def step(gradients):
        optimizer.apply(gradients, variables)
        graphs.append(tf.compat.v1.get_default_graph())

    # Keras sums up gradients of the variable's own type only.
    given = dtype if optimizer.gradient_accumulation_steps else "float32"
    for _ in range(steps):
        step([tf.constant(random.normal(size=shape), given) for shape in shapes])
    return [v.numpy() for v in [*variables, *optimizer.variables[2:]]], graphs[-1]


def kinds(graph):
    """The kinds of operations an update takes."""
    return {op.type for op in graph.get_operations()}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.1},
        {"learning_rate": 0.1, "momentum": 0.9},
        {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {
            "learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5),
            "momentum": 0.5,
            "global_clipnorm": 1.0,
            "gradient_accumulation_steps": 2,
        },
    ],
    ids=["plain", "momentum", "nesterov, decay", "schedule, clipping, accumulation"],
)
def test_one_operation_computes_the_same_bits(options, dtype):
    def make():
        return keras.optimizers.SGD(**options)

    parts, _ = trained(make, dtype=dtype)
    whole, graph = trained(make, fused_kernels.fuse_updates, dtype)
    for ours, theirs in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if "gradient_accumulation_steps" not in options:  # there inside a branch
        assert kinds(graph) & ONE_OP


def test_rows_of_a_table_are_updated_alone():
    table = keras.Variable(np.ones((5, 2), "float32"))
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([table])
    fused_kernels.fuse_updates(optimizer)
    rows = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([1, 3]), tf.constant([5, 2]))
    optimizer.apply([rows], [table])
    np.testing.assert_array_equal(table.numpy()[:, 0], [1, 0.5, 1, 0.5, 1])


ADAMS = {
    "adam": lambda: keras.optimizers.Adam(0.01, beta_1=0.8, epsilon=1e-3),
    "adamw, clipping": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=1.0),
}


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("make", ADAMS.values(), ids=ADAMS)
def test_adam_is_fused_where_it_was_chosen_and_is_near_to_keras_s(
    monkeypatch, make, dtype, tolerance
):
    monkeypatch.setenv(FUSED_ADAM, "0")
    parts, without = trained(make, fused_kernels.fuse_updates, dtype)
    monkeypatch.setenv(FUSED_ADAM, "1")
    whole, graph = trained(make, fused_kernels.fuse_updates, dtype)
    assert "ResourceApplyAdam" in kinds(graph) - kinds(without)
    for ours, theirs in zip(whole, parts, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, 5 * tolerance, tolerance)


def test_amsgrad_and_rows_of_a_table_stay_keras_s(monkeypatch):
    monkeypatch.setenv(FUSED_ADAM, "1")
    _, graph = trained(lambda: keras.optimizers.Adam(amsgrad=True), fused_kernels.fuse_updates)
    assert "ResourceApplyAdam" not in kinds(graph)
    found = []
    for chosen in ("0", "1"):
        monkeypatch.setenv(FUSED_ADAM, chosen)
        table = keras.Variable(np.ones((5, 2), "float32"))
        optimizer = keras.optimizers.Adam(0.5)
        optimizer.build([table])
        fused_kernels.fuse_updates(optimizer)
        rows = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([1, 3]), tf.constant([5, 2]))
        optimizer.apply([rows], [table])
        found.append(table.numpy())
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    "made",
    [
        lambda: keras.optimizers.Adam(),
        lambda: type("Own", (keras.optimizers.SGD,), {})(0.1),
    ],
    ids=["another", "a class of one's own"],
)
def test_other_optimizers_are_left_as_they_are(made):
    parts, before = trained(made)
    whole, graph = trained(made, fused_kernels.fuse_updates)
    assert kinds(graph) == kinds(before)
    for ours, theirs in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Lion", "Nadam", "Adafactor"])
def test_xla_compiles_updates_of_large_variables(name):
    def make():
        return getattr(keras.optimizers, name)(0.01)

    def prepare(optimizer):
        fused_kernels.fuse_updates(optimizer)
        fused_kernels.compile_updates(optimizer, True)

    shapes = ((128, 128), (127, 129))
    parts, _ = trained(make, shapes=shapes)
    whole, graph = trained(make, prepare, shapes=shapes)
    for ours, theirs in zip(whole, parts, strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-5, 1e-6)
    functions = graph.as_graph_def().library.function
    compiled = [f for f in functions if f.attr["_XlaMustCompile"].b]
    assert len(compiled) == 1, "one for the variable of 16,384 elements, none for the other"


def test_updates_are_not_compiled_any_more_when_the_model_is_not():
    def prepare(optimizer):
        fused_kernels.fuse_updates(optimizer)
        fused_kernels.compile_updates(optimizer, True)
        fused_kernels.compile_updates(optimizer, False)

    _, graph = trained(keras.optimizers.Adam, prepare, shapes=((128, 128),))
    assert not graph.as_graph_def().library.function
