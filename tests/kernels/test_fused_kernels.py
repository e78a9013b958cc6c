"""Fused updates are Keras's own, bit for bit; fused layers are near to it."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.cluster.variables import FUSED_BATCH_NORM
from dtk.errors import ClusterError
from dtk.kernels import fused_layers, optimizer_updates

from support.newer_keras import RENORM

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


@pytest.mark.parametrize(
    "dtype, options",
    [
        ("float64", {}),
        ("float32", {"momentum": 0.9}),
        ("float64", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (
            "float32",
            {
                "learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5),
                "momentum": 0.5,
                "global_clipnorm": 1.0,
                "gradient_accumulation_steps": 2,
            },
        ),
    ],
    ids=["plain", "momentum", "nesterov, decay", "schedule, clipping, accumulation"],
)
def test_one_operation_computes_the_same_bits(options, dtype):
    def make():
        return keras.optimizers.SGD(**{"learning_rate": 0.1, **options})

    parts, _ = trained(make, dtype=dtype)
    whole, graph = trained(make, optimizer_updates.fuse_updates, dtype)
    for ours, theirs in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if "gradient_accumulation_steps" not in options:  # there inside a branch
        assert kinds(graph) & ONE_OP


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_rows_of_a_table_are_updated_alone(kind):
    table = keras.Variable(np.ones((5, 2), "float32"))
    optimizer = kind(0.5)
    optimizer.build([table])
    optimizer_updates.fuse_updates(optimizer, replicas=2)
    rows = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([1, 3]), tf.constant([5, 2]))
    optimizer.apply([rows], [table])
    np.testing.assert_allclose(table.numpy()[:, 0], [1, 0.5, 1, 0.5, 1], 1e-4)


ADAMS = {
    "adam": lambda: keras.optimizers.Adam(0.01, beta_1=0.8, epsilon=1e-3),
    "adam, two means apart": lambda: keras.optimizers.Adam(0.01, beta_1=0.999),
    "adamw, clipping": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=1.0),
}


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-7), ("float64", 1e-15)])
@pytest.mark.parametrize("make", ADAMS.values(), ids=ADAMS)
def test_adam_is_fused_between_replicas_and_is_near_to_keras_s(make, dtype, tolerance):
    parts, without = trained(make, optimizer_updates.fuse_updates, dtype)
    whole, graph = trained(make, lambda adam: optimizer_updates.fuse_updates(adam, 2), dtype)
    assert "ResourceApplyAdam" in kinds(graph) - kinds(without)
    for ours, theirs in zip(whole, parts, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, 5 * tolerance, tolerance)


@pytest.mark.parametrize(
    "made, replicas, dtype",
    [
        (lambda: keras.optimizers.Adam(), 1, "float32"),
        (lambda: keras.optimizers.Adam(amsgrad=True), 2, "float32"),
        (lambda: keras.optimizers.Adam(beta_1=keras.Variable(0.9)), 2, "float32"),
        (lambda: keras.optimizers.SGD(0.1), 2, "bfloat16"),  # TensorFlow has no kernel on GPUs
        (lambda: type("Own", (keras.optimizers.SGD,), {})(0.1), 2, "float32"),
    ],
    ids=["one process", "amsgrad", "a variable", "bfloat16", "a class of one's own"],
)
def test_other_updates_are_left_as_they_are(made, replicas, dtype):
    assert_left(made, replicas, dtype)


def test_an_update_that_a_script_has_put_into_keras_s_class_is_left(monkeypatch):
    """It was ignored, in silence: the class was still Keras's."""
    update = keras.optimizers.SGD.update_step

    @functools.wraps(update)
    def half(self, gradient, variable, rate):
        update(self, 0.5 * gradient, variable, rate)

    monkeypatch.setattr(keras.optimizers.SGD, "update_step", half)
    assert_left(lambda: keras.optimizers.SGD(0.1), 2, "float32")


def assert_left(made, replicas, dtype):
    parts, before = trained(made, dtype=dtype)
    whole, graph = trained(made, lambda it: optimizer_updates.fuse_updates(it, replicas), dtype)
    assert kinds(graph) == kinds(before)
    for ours, theirs in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "name, wished",
    [("AdamW", [True]), ("Nadam", [True]), ("Adafactor", [True]), ("Adam", [True, False])],
)
def test_xla_compiles_updates_of_large_variables_while_it_compiles_the_model(name, wished):
    def make():
        return getattr(keras.optimizers, name)(0.01)

    def prepare(optimizer):
        optimizer_updates.fuse_updates(optimizer)
        for one in wished:
            optimizer_updates.compile_updates(optimizer, one)

    shapes = ((128, 128), (127, 129))
    parts, _ = trained(make, shapes=shapes)
    whole, graph = trained(make, prepare, shapes=shapes)
    for ours, theirs in zip(whole, parts, strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-5, 1e-6)
    functions = graph.as_graph_def().library.function
    compiled = [f for f in functions if f.attr["_XlaMustCompile"].b]
    # One for the variable of 16,384 elements, none for the other.
    assert len(compiled) == wished[-1]


# Normalization.

FUSED = "FusedBatchNormV3"


def normalized(
    shape,
    *,
    mask=None,
    trainable=True,
    training=True,
    dtype="float32",
    channels=True,
    kind=keras.layers.BatchNormalization,
    **options,
):
    """What a layer returns, its gradients, its weights after it, and the operations it took."""
    random = np.random.default_rng(5)
    policy = dtype if dtype in ("float32", "float64") else f"mixed_{dtype}"
    layer = kind(momentum=0.7, dtype=policy, **options)
    layer.trainable = trainable
    layer.build(shape)
    for weight in layer.weights:
        weight.assign(random.uniform(0.5, 1.5, weight.shape))
    x = tf.constant(random.normal(3.0, 2.0, shape), dtype)
    known = [None, *shape[1:-1], shape[-1] if channels else None]
    upstream = tf.constant(random.normal(size=shape), dtype)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(known, dtype)])
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=training, mask=mask)
            loss = tf.reduce_sum(y * upstream)
        found = tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])
        kinds.update(op.type for op in tf.compat.v1.get_default_graph().get_operations())
        return y, *found

    kinds = set()
    found = [np.asarray(one, "float64") for one in step(x)]
    return found + [v.numpy() for v in layer.weights], kinds


@pytest.mark.parametrize(
    "shape, options",
    [
        ((4, 5, 6, 3), {}),
        ((4, 5, 6, 3), {"axis": 3, "epsilon": 1e-2, "scale": False, "center": False}),
        ((16, 7), {}),
        ((4, 6, 5), {"scale": False}),
        ((2, 3, 4, 2, 3), {"center": False}),
        ((1, 3), {}),
        ((4, 5, 6, 3), {"dtype": "float16"}),
    ],
)
def test_equals_keras(shape, options):
    own, without = normalized(shape, **options)
    with fused_layers.patch_layers(2):
        fused, kinds = normalized(shape, **options)
    assert FUSED in kinds and FUSED not in without
    tolerance = 1e-2 if "dtype" in options else 2e-5
    for one, other in zip(fused, own, strict=True):
        np.testing.assert_allclose(one, other, tolerance, tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"axis": 1},
        {"epsilon": 1e-6},
        {"synchronized": True},
        pytest.param({"renorm": True}, marks=RENORM),
        {"mask": np.ones((4, 5, 6), bool)},
        {"trainable": False},
        {"training": False},
        {"dtype": "float64"},
        {"channels": False},
        {"kind": type("Ghost", (keras.layers.BatchNormalization,), {})},
    ],
    ids=str,
)
def test_what_it_cannot_compute_stays_keras_s(options):
    with fused_layers.patch_layers(2):
        found, kinds = normalized((4, 5, 6, 3), **options)
    assert FUSED not in kinds
    for one, other in zip(found, normalized((4, 5, 6, 3), **options)[0], strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_replica_computes_as_keras_unless_chosen(monkeypatch):
    fused = []
    for replicas, chosen in ((1, None), (1, "1"), (2, None), (2, "0")):
        if chosen is not None:
            monkeypatch.setenv(FUSED_BATCH_NORM, chosen)
        with fused_layers.patch_layers(replicas):
            fused.append(FUSED in normalized((4, 7))[1])
        monkeypatch.delenv(FUSED_BATCH_NORM, raising=False)
    assert fused == [False, True, True, False]
    monkeypatch.setenv(FUSED_BATCH_NORM, "yes")
    with (
        fused_layers.patch_layers(2),
        pytest.raises(ClusterError, match="DTK_FUSED_BATCH_NORM='yes', expected 0 or 1"),
    ):
        normalized((4, 7))


def projected(equation, x, kernel, dtype="float32"):
    """A product and its gradients, and the shapes of all tensors that were computed."""
    random = np.random.default_rng(7)
    x = tf.constant(random.normal(size=x), dtype)
    kernel = keras.Variable(random.normal(size=kernel), dtype=dtype)
    shapes = []

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = keras.ops.einsum(equation, x, kernel)
            loss = tf.reduce_sum(tf.square(y))
        found = tape.gradient(loss, [x, kernel.value])
        graph = tf.compat.v1.get_default_graph()
        shapes.extend(t.shape for op in graph.get_operations() for t in op.outputs)
        return [tf.cast(one, "float64") for one in (y, *found)]

    return [one.numpy() for one in step(x)], shapes


@pytest.mark.parametrize(
    "equation, x, kernel",
    [
        ("abc,cde->abde", (6, 4, 5), (5, 2, 3)),  # query, key and value of an attention
        ("abcd,cde->abe", (6, 4, 2, 3), (2, 3, 5)),  # its output
        ("BTD,DF->BTF", (6, 4, 5), (5, 3)),
        ("abc,dc->abd", (6, 4, 5), (3, 5)),
    ],
)
def test_the_gradient_of_a_projection_is_one_product(equation, x, kernel):
    """Breaks as memory and time for a gradient of the matrix for each row of the batch."""
    own, before = projected(equation, x, kernel)
    with fused_layers.patch_layers(2):
        fused, shapes = projected(equation, x, kernel)
    for one, other in zip(fused, own, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-5)
    entries = x[0] * np.prod(kernel)
    assert entries in [s.num_elements() for s in before]
    assert entries not in [s.num_elements() for s in shapes]


@pytest.mark.parametrize(
    "replicas, equation, x, kernel, dtype",
    [
        (1, "abc,cde->abde", (6, 4, 5), (5, 2, 3), "float32"),
        (2, "abcd,abde->abce", (6, 4, 2, 3), (6, 4, 3, 5), "float32"),  # a matrix for each row
        (2, "abc,cd->abd", (2, 6, 4, 5), (5, 3), "float32"),  # stacks of both
        (2, "abc,cd->abd", (256, 64, 4), (4, 8), "bfloat16"),  # else 1020 is 768
    ],
)
def test_other_products_stay_keras_s(replicas, equation, x, kernel, dtype):
    own, _ = projected(equation, x, kernel, dtype)
    with fused_layers.patch_layers(replicas):
        found, _ = projected(equation, x, kernel, dtype)
        whole = keras.ops.einsum("abc,cd->abd", *(tf.ones(s, "int32") for s in ((2, 3, 4), (4, 5))))
    assert whole.dtype == "int32"
    for one, other in zip(found, own, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_attention_of_sequences_of_any_length_equals_keras():
    layer = keras.layers.MultiHeadAttention(2, 3)
    x = tf.constant(np.random.default_rng(1).normal(size=(4, 7, 6)), "float32")
    layer.build(x.shape, x.shape)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, None, 6])])
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(x, x)))
        return tape.gradient(loss, [v.value for v in layer.trainable_variables])

    own = [g.numpy() for g in step(x)]
    with fused_layers.patch_layers(2):
        again = tf.function(step.python_function, autograph=False)
        fused = [g.numpy() for g in again(x)]
    operations = again.get_concrete_function(x).graph.get_operations()
    assert "BatchMatMulV2" not in {op.type for op in operations}
    for one, other in zip(fused, own, strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-4)
