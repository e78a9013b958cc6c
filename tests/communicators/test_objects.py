"""A rank reads no code of strangers: values are data, or pickles sealed with the job's secret."""

import collections
import dataclasses
import datetime
import errno
import math
import os
import pathlib
import pickle

import ml_dtypes
import numpy as np
import optuna
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import dtk
from dtk.cluster.variables import JOB_SECRET
from dtk.communicators import objects, plain_data
from dtk.communicators.objects import dumps, loads
from dtk.data.rows import Elements
from dtk.errors import CheckpointSaveError, CommunicatorError, NotDistributedError
from dtk.launch.ssh import HostFacts
from dtk.search.rounds import CaughtRankError, Failure, RankError, RoundMessage
from dtk.search.study import Distribution, Results

from support.world import communicator

SECRET = {JOB_SECRET: "5f2c"}
RAN = []


class Own:
    """What a user may have."""


class OwnError(Exception):
    """An error of a script."""


class OwnPruned(optuna.TrialPruned):
    """A trial that a script ends in its own way."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


# What looks like data.
OwnText = type("OwnText", (str,), {})
OwnArray = type("OwnArray", (np.ndarray,), {})
OwnNumber = type("OwnNumber", (np.float32,), {})
OwnPoint = collections.namedtuple("OwnPoint", "x")
OwnRecord = dataclasses.make_dataclass("OwnRecord", "x")


class Harm:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def sent(value, environ):
    return loads(dumps(value, environ), environ)


def same(found, value):
    """Equal, and of equal types: NaN equals NaN, and -0.0 is not 0.0."""
    assert type(found) is type(value)
    if isinstance(value, dict):
        assert list(found) == list(value) or any(key != key for key in value)
        for one, other in zip(found.values(), value.values(), strict=True):
            same(one, other)
    elif isinstance(value, list | tuple):
        assert len(found) == len(value)
        for one, other in zip(found, value, strict=True):
            same(one, other)
    elif isinstance(value, np.ndarray):
        assert (found.dtype, found.shape) == (value.dtype, value.shape) and found.flags.writeable
        assert found.tobytes() == value.tobytes()
    elif isinstance(value, tf.Tensor):
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(found.numpy(), value.numpy())
    elif isinstance(value, float) and value == value:
        assert found == value and math.copysign(1, found) == math.copysign(1, value)
    else:
        assert found == value or (found != found and value != value)


KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.dates()
LEAVES = KEYS | st.one_of(
    st.text(st.characters(exclude_categories=())),  # lone surrogates, too
    st.floats(),
    st.complex_numbers(),
    st.timedeltas(),
    st.datetimes(timezones=st.none() | st.just(datetime.UTC), allow_imaginary=False),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
)
DTYPES = (
    arrays.scalar_dtypes()
    | (arrays.byte_string_dtypes() | arrays.unicode_string_dtypes())
    | (arrays.datetime64_dtypes() | arrays.timedelta64_dtypes())
)
ARRAYS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, min_side=0, max_side=3))
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(KEYS, inner)
        | st.tuples(inner, inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
)


@given(VALUES)
@example([(1, [2]), 1, True, 1.0, -0.0, 2**63, -(2**63) - 1, 2**70])
@example("\ud800\udc00")
def test_data_arrives_as_what_it_was(value):
    for environ in (SECRET, {}):
        same(sent(value, environ), value)


@given(ARRAYS)
def test_arrays_arrive_as_what_they_were(array):
    same(sent(array, {}), array)
    if array.size and not isinstance(array.flat[0], np.str_ | np.bytes_):
        number = array.flat[0]
        found = sent(number, {})
        assert type(found) is type(number) and found.tobytes() == number.tobytes()


@pytest.mark.parametrize(
    "dtype",
    [
        *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        *("float8_e4m3b11fnuz", "int2", "int4", "uint2", "uint4"),
    ],
)
def test_numbers_of_few_bits_arrive(dtype):
    dtype = getattr(ml_dtypes, dtype)
    same(sent(np.array([[1], [0]], dtype), {}), np.array([[1], [0]], dtype))
    assert type(sent(dtype(1), {})) is dtype


def test_other_arrays_arrive(tmp_path):
    for array in (
        np.array([[None, (1,)], [[2], "a"]], object),
        np.empty((2, 0), object),
        np.arange(6).reshape(2, 3).T[::-1],
        np.array(["a\0b", "\ud800"]),
    ):
        found = sent(array, {})
        assert found.dtype == array.dtype and found.tolist() == array.tolist()
    for text in (np.str_("a\0"), np.bytes_(b"a\0")):
        assert sent(text, {}) == text and type(sent(text, {})) is type(text)
    mapped = np.memmap(tmp_path / "rows", "i4", "w+", shape=(3,))
    assert type(sent(mapped, {})) is np.ndarray and sent(mapped, {}).tolist() == [0, 0, 0]


def test_tensors_arrive():
    for tensor in (
        *(tf.constant(1.5, tf.float16), tf.constant([[1, 2]], tf.bfloat16)),
        *(tf.zeros([3, 0], tf.bool), tf.cast([1, 2], tf.as_dtype("int4"))),
        *(tf.constant([[b"a\0"], [b"bc"]]), tf.constant(b"a\0"), tf.zeros([0, 2], tf.string)),
    ):
        same(sent(tensor, {}), tensor)
    nested = tf.ragged.constant([[[1], [2, 3]], []], row_splits_dtype=tf.int32)
    uniform = tf.RaggedTensor.from_uniform_row_length(tf.ragged.constant([["a"], [], [], []]), 2)
    for ragged in (nested, uniform):
        found = sent(ragged, {})
        assert (found.shape.as_list(), found.dtype) == (ragged.shape.as_list(), ragged.dtype)
        assert found.row_splits.dtype == ragged.row_splits.dtype
        assert found.to_list() == ragged.to_list()
    sparse = tf.SparseTensor([[0, 1]], [2.0], [3, 4])
    found = sent(sparse, {})
    assert type(found) is tf.SparseTensor
    for name in ("indices", "values", "dense_shape"):
        same(getattr(found, name), getattr(sparse, name))


def test_what_describes_data_arrives():
    zone = datetime.timezone(datetime.timedelta(hours=1), "here")
    others = [
        tf.float32, tf.as_dtype("float8_e5m2"), tf.TensorShape([None, 3]), tf.TensorSpec((None, 3)),
        tf.TensorSpec(None, tf.string, "text"), datetime.datetime(2024, 1, 2, fold=1, tzinfo=zone),
        pathlib.Path("/a"), pathlib.PurePosixPath("a/b"), collections.OrderedDict(b=1, a=2),
        # records of dtk
        HostFacts((1,), (0,), "lo", versions={"a": "1"}),
        RoundMessage("here", 2.0, failure=Failure.of(ValueError("no"), 1)),
        Elements({"x": tf.TensorSpec((), tf.int64)}, [{"x": 1}]),
        dtk.exchange.Delayed(dtk.exchange.Quantized(1)), dtk.exchange.BlockMomentum(64),
    ]  # fmt: skip
    found = sent(others, {})
    assert found == others and [type(one) for one in found] == [type(one) for one in others]
    assert (found[5].fold, found[5].tzinfo.tzname(None)) == (1, "here")
    assert sent(tf.TensorShape(None), {}).rank is None


def test_a_study_arrives():
    study = optuna.create_study(study_name="s", directions=["minimize", "maximize"])

    def objective(trial):
        trial.set_user_attr("note", [1, {"a": None}])
        x = trial.suggest_float("x", 0, 1, log=False, step=0.25)
        kind = trial.suggest_categorical("kind", ["a", None, 3])
        return x + trial.suggest_int("n", 1, 8, log=True), bool(kind)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study.optimize(objective, 3)
    study.enqueue_trial({"x": 0.5})
    found = sent(Results.of(study, 7), {}).study()
    assert (found.study_name, found.directions) == ("s", study.directions)
    for mine, theirs in zip(found.trials, study.trials, strict=True):
        assert vars(mine) | {"_trial_id": 0} == vars(theirs) | {"_trial_id": 0}
    one = optuna.distributions.CategoricalDistribution(("a", 1))
    assert sent(Distribution.of(one), {}).made() == one


def of_tensorflow():
    try:
        tf.zeros([2, 3]) @ tf.zeros([2, 3])
    except tf.errors.InvalidArgumentError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        *(ValueError("no", 3), KeyError((1, 2)), StopIteration(5), NotDistributedError("alone")),
        ImportError("none", name="a", path="b"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        FileNotFoundError(errno.ENOENT, "no such file", "a", None, b"b"),
        CheckpointSaveError(errno.ENOSPC, "disk full", "/a"),
        *(OSError("broken"), of_tensorflow()),
        ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_arrive(error):
    error.add_note("here")
    error.seen = [1, (2,)]
    found = sent(error, {})
    assert (type(found), str(found)) == (type(error), str(error))
    assert found.__notes__ == ["here"]
    found.add_note("and there")
    for name in ("filename", "filename2", "errno", "name", "path"):
        assert getattr(found, name, None) == getattr(error, name, None)
    if not isinstance(error, tf.errors.OpError):
        assert repr(found.args) == repr(error.args) and found.seen == [1, (2,)]


def exception_without_its_arguments():
    error = UnicodeDecodeError("utf-8", b"", 0, 1, "why")
    error.args = ("why",)
    return error


NOT_PLAIN = [
    *(Own(), OwnText("a"), OwnPoint(1), OwnRecord(1), OwnNumber(1), OwnError("mine")),
    *(np.zeros(2).view(OwnArray), np.ma.masked_array([1]), np.zeros(2, "i4,f4"), np.zeros(2, "V3")),
    *(collections.Counter("a"), Own, len, bytearray(b"a"), exception_without_its_arguments()),
    *(tf.Variable(1.0), tf.RaggedTensorSpec([None]), errno, tf.Variable(1).handle),
    tf.data.experimental.to_variant(tf.data.Dataset.range(1)),
]


@pytest.mark.parametrize("value", NOT_PLAIN, ids=lambda value: type(value).__name__)
def test_no_class_but_those_known_is_data(value):
    """Not a subclass of theirs either: it would arrive as something else."""
    with pytest.raises(plain_data.NotPlain):
        plain_data.encode([{"a": (value,)}])


def test_a_class_of_a_script_is_sent_only_where_there_is_a_secret():
    assert isinstance(sent([Own()], SECRET)[0], Own)
    assert sent(OwnError("mine", 3), SECRET).args == ("mine", 3)
    with pytest.raises(CommunicatorError) as refused:
        dumps([Own()], {})
    for part in (
        "test_objects.Own cannot be sent between ranks as plain data",
        "export DTK_JOB_SECRET=$(python -c 'import secrets; print(secrets.token_hex())')",
        "mpirun -x DTK_JOB_SECRET",
        "`dtk run`",
    ):
        assert part in str(refused.value)


def test_bytes_that_are_too_many_for_one_piece_arrive(monkeypatch):
    monkeypatch.setattr(plain_data, "_CHUNK", 10)
    for value in (b"x" * 9 + b"y" * 19, np.arange(7.0), np.float64(2), tf.range(9)):
        found = sent(value, {})
        assert type(found) is type(value) and np.array_equal(found, value)


def test_nothing_ends_in_a_loop_and_data_is_not_pickled_where_there_is_a_secret(monkeypatch):
    circle = []
    circle.append(circle)
    with pytest.raises(CommunicatorError, match=r"builtins\.list that is nested too deeply"):
        dumps(circle, {})
    assert isinstance(sent(circle, SECRET)[0][0], list)
    monkeypatch.setattr(objects.pickle, "dumps", None)
    assert sent([1, {"a": np.zeros(3)}], SECRET)[0] == 1


# What is not read.


def test_a_pickle_without_a_seal_is_not_read():
    for body in (b"op", b"od", b"o"):
        told = "pickle came.*mpirun -x DTK_JOB_SECRET" if body == b"op" else "cannot be read"
        with pytest.raises(CommunicatorError, match=told):
            loads(body + pickle.dumps(Harm(RAN.append, 1)), {})
    assert RAN == []
    # One with a seal that makes nothing here is told.
    with pytest.raises(CommunicatorError, match="cannot be read.*ZeroDivisionError"):
        sent(Harm(divmod, 1, 0), SECRET)


def test_a_seal_covers_every_part_of_a_large_value(monkeypatch):
    monkeypatch.setattr(objects, "_PART", 10)
    payload = dumps(b"x" * 100, SECRET)
    assert loads(payload, SECRET) == b"x" * 100
    with pytest.raises(CommunicatorError, match="was not written"):
        loads(payload[:-3] + b"y" + payload[-2:], SECRET)


@pytest.mark.parametrize("value", [Harm(RAN.append, 1), [1, "a"]], ids=["pickle", "data"])
def test_a_sealed_payload_that_was_changed_anywhere_is_not_read(value):
    payload = dumps(value, SECRET)
    for place in range(len(payload)):
        changed = bytearray(payload)
        changed[place] ^= 1
        with pytest.raises(CommunicatorError, match="DTK_JOB_SECRET"):
            loads(bytes(changed), SECRET)
    assert RAN == []


def test_ranks_with_other_secrets_do_not_read_each_other():
    with pytest.raises(CommunicatorError, match="was not written with this job's DTK_JOB_SECRET"):
        loads(dumps(1, SECRET), {JOB_SECRET: "other"})
    for writes, reads, has in ((SECRET, {}, "the other"), ({}, SECRET, "this rank")):
        with pytest.raises(CommunicatorError, match=f"{has} has one and .*start the job with"):
            loads(dumps(1, writes), reads)


# What a study makes of exceptions that cannot be sent.


def test_a_pruned_trial_is_pruned_and_an_exception_of_a_script_is_told_by_its_words(monkeypatch):
    monkeypatch.delenv(JOB_SECRET, raising=False)
    for error in (optuna.TrialPruned("enough"), OwnPruned(1, 2)):
        made = sent(Failure.of(error, 1), {}).error()
        assert type(made) is optuna.TrialPruned and f"{error}" in str(made)
    for catch, kind in (((), RankError), ((OwnError,), CaughtRankError)):
        made = sent(Failure.of(OwnError("mine"), 1, catch), {}).error()
        assert type(made) is kind and "OwnError: mine" in str(made)
    assert type(Failure.of(of_tensorflow(), 1).error()) is tf.errors.InvalidArgumentError
    # A single process is refused nothing.
    alone, own = dtk.communicators.create("local"), Own()
    assert alone.broadcast_object(own) is own and alone.allgather_object(own)[0] is own


# Between ranks.


def sends():
    """What every rank, and what one alone, is told of a user's class; then data."""
    assert JOB_SECRET not in os.environ
    comm = communicator()

    def told(call, value):
        with pytest.raises(CommunicatorError) as refused:
            call(value)
        return str(refused.value)

    of_one = Own() if comm.rank == 1 else 1
    return (
        told(comm.allgather_object, Own()),
        told(comm.allgather_object, of_one),
        told(lambda value: comm.broadcast_object(value, 1), of_one),
        comm.allgather_object((comm.rank, np.float32(comm.rank), {"a"})),
    )


@pytest.mark.parametrize("backend, size", [("mpi-wheel", 2)])
def test_under_mpirun_a_class_of_a_script_is_refused_on_all_ranks(world, backend, size):
    first, second = world(backend, size).run(sends)
    why = "test_objects.Own cannot be sent between ranks"
    assert all(why in told for told in (first[0], second[0], second[1], second[2]))
    other = "rank 0: rank 1 has a value that cannot be sent, and says why"
    assert first[1:3] == (other, other)
    assert first[3] == second[3] == [(rank, np.float32(rank), {"a"}) for rank in range(2)]
