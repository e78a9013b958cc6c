"""A rank reads no code of strangers: values are sealed with the job's secret, if it has one."""

import datetime
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from dtk.cluster import letters
from dtk.cluster.letters import read, write
from dtk.cluster.variables import JOB_SECRET
from dtk.errors import CommunicatorError, NotDistributedError
from dtk.launch.ssh import Facts

SECRET = {JOB_SECRET: "5f2c"}
RAN = []


class Own:
    """What a user may have."""


class OwnError(Exception):
    """An error of a script."""


class Harm:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def sent(value, environ):
    return read(write(value, environ), environ)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.tuples(inner, inner)
        | st.frozensets(st.integers())
    ),
)


@given(VALUES)
def test_data_arrives_with_and_without_a_secret(value):
    for environ in (SECRET, {}):
        assert sent(value, environ) == value


def test_arrays_records_and_exceptions_arrive():
    arrays = {"x": np.arange(6, dtype="float16").reshape(2, 3), "y": np.float32(2), "o": [None]}
    found = sent(arrays, {})
    np.testing.assert_array_equal(found["x"], arrays["x"])
    assert found["x"].dtype == "float16" and found["y"] == 2
    others = [
        Facts((1,), (0,), "lo"), tf.float32, tf.TensorSpec((None, 3), tf.int64),
        datetime.timedelta(1), pathlib.Path("/a"),
    ]  # fmt: skip
    assert sent(others, {}) == others
    for error in (ValueError("no"), NotDistributedError("alone"), OwnError("mine", 3)):
        assert type(sent(error, {})) is type(error) and sent(error, {}).args == error.args


def test_any_value_arrives():
    assert isinstance(sent(Own(), SECRET), Own)
    assert isinstance(sent(Own(), {}), Own)


def test_a_seal_covers_every_part_of_a_large_value(monkeypatch):
    monkeypatch.setattr(letters, "_PART", 10)
    letter = write(b"x" * 100, SECRET)
    assert read(letter, SECRET) == b"x" * 100
    with pytest.raises(CommunicatorError, match="was not written"):
        read(letter[:-3] + b"y" + letter[-2:], SECRET)


@pytest.mark.parametrize("place", [0, 1, 20, -1])
def test_a_sealed_letter_that_was_changed_is_not_read(place):
    letter = bytearray(write(Harm(RAN.append, 1), SECRET))
    letter[place] ^= 1
    with pytest.raises(CommunicatorError, match="DTK_JOB_SECRET"):
        read(bytes(letter), SECRET)
    assert RAN == []


def test_ranks_with_other_secrets_do_not_read_each_other():
    with pytest.raises(CommunicatorError, match="was not written with this job's DTK_JOB_SECRET"):
        read(write(1, SECRET), {JOB_SECRET: "other"})
    for writes, reads, has in ((SECRET, {}, "the other"), ({}, SECRET, "this rank")):
        with pytest.raises(CommunicatorError, match=f"{has} has one and .*start the job with"):
            read(write(1, writes), reads)
