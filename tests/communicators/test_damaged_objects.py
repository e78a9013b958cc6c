"""What strangers may send is refused: nothing is run for it, and no memory taken."""

import dataclasses
import datetime
import pathlib
import re
import struct
import tracemalloc

import msgpack
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dtk
from dtk.communicators.local import LocalCommunicator
from dtk.communicators.objects import dumps, loads
from dtk.errors import CommunicatorError
from dtk.exchange import Dense
from dtk.search.distributed_trial import Start
from dtk.search.rounds import Failure, RoundMessage


def written(tree, more=b""):
    """A payload as a stranger may make one."""
    return b"od" + (tree if isinstance(tree, bytes) else msgpack.packb(tree)) + more


def place(kind):
    return kind.__module__, kind.__qualname__


def record(module, name, **fields):
    return {"record": [module, name, {"dict": [list(pair) for pair in fields.items()]}]}


def error(module, name, *args, **state):
    return {"error": [module, name, {"tuple": [*args]}, {"dict": [list(p) for p in state.items()]}]}


def tensor(dtype, size, content):
    return {"tf.Tensor": [{"array": [dtype, [size], [content]]}]}


NO_ROWS, TWO_ROWS = struct.pack("<qq", 0, 5), struct.pack("<qqq", 0, 1, 3)
FAILURE = dataclasses.asdict(Failure(0, "", "", None))
DAMAGED = {
    "a class of Python's": [record("subprocess", "Popen", args="touch ran")],
    "a module that dtk imports": [record("dtk.communicators.plain_data", "sys.exit")],
    "a module that nobody has imported": [record("dtk.nowhere", "Thing")],
    "a record by another module's name for it": [record(Start.__module__, "Failure", **FAILURE)],
    "a class of dtk's that is no record": [record(*place(LocalCommunicator), host="a")],
    "other fields": [record(*place(Failure), **FAILURE, more=1)],
    "fewer fields": [record(*place(Failure), rank=0, kind="", text="", sent=None)],
    "values that a record refuses": [record(*place(Dense), dtype="int8", factors=True)],
    "an error of another package": [error("optuna.exceptions", "TrialPruned")],
    "an error that ends the process": [error("builtins", "SystemExit", 0)],
    "a function for an error": [error("builtins", "print", "ran")],
    "notes that cannot be added to": [error("builtins", "ValueError", __notes__=1)],
    "an attribute of Python's": [error("builtins", "ValueError", __cause__=None)],
    "a method of an error": [error("builtins", "ValueError", add_note=1)],
    "more elements than bytes": [{"array": ["<f4", [10**15], [b"a"]]}],
    "fewer elements than bytes": [{"array": ["|u1", [1], [b"ab"]]}],
    "elements without bytes": [{"array": ["|S0", [10**15], []]}],
    "sizes below 0": [{"array": ["|u1", [-1, -1], [b"a"]]}],
    "sizes that are no numbers": [{"array": ["|u1", [1.0], [b"a"]]}],
    "too many axes to multiply": [{"array": ["|u1", [{"int": [hex(10**4000)]}] * 3000, [b"a"]]}],
    "more objects than there are": [{"array": ["objects", [10**15], [1]]}],
    "an array of objects by its bytes": [{"array": ["|O", [1], [b"\1" * 8]]}],
    "an array of objects by another name": [{"array": ["string", [1], [b"\1" * 8]]}],
    "fields of an array": [{"array": ["i4,i4", [1], [b"\1" * 8]]}],
    "fields of an array of TensorFlow's": [{"array": ["qint8", [1], [b"\1"]]}],
    "a dtype of any name": [{"array": ["print", [1], [b"a"]]}],
    "characters that are none": [{"array": ["<U1", [1], [b"\xff\xff\xff\x7f"]]}],
    "bools that are none": [{"array": ["|b1", [1], [b"\2"]]}],
    "an array that is text": [{"array": ["<U1", [1], "a\0\0\0"]}],
    "pieces of an array that are text": [{"array": ["<U1", [1], ["a\0\0\0"]]}],
    "rows that are not there": [
        {"tf.RaggedTensor": [tensor("<i4", 1, b"\0" * 4), tensor("<i8", 2, NO_ROWS), None]}],
    "rows of another length": [
        {"tf.RaggedTensor": [tensor("<i4", 3, b"\0" * 12), tensor("<i8", 3, TWO_ROWS), 1]}],
    "a tensor of what is no array": [{"tf.Tensor": ["a"]}],
    "more strings than there are": [{"tf.Tensor": [{"array": ["objects", [10**15], [b"a"]]}]}],
    "strings that are none": [{"tf.Tensor": [{"array": ["objects", [1], [{"tuple": []}]]}]}],
    "a dtype that is none": [{"tf.DType": ["nothing"]}],
    "a path of numbers": [{"path": [1]}],
    "a date of bytes": [{"date": [b"\x07\xe4\x01\x01"]}],
    "text by a codec": [{"np.str": [b"a", "ascii"]}],
    "an unknown kind": [{"lambda": []}],
    "two kinds": [{"tuple": [], "set": []}],
    "a kind without content": [{"tuple": 1}],
    "a kind that is a number": [{1: []}],
    "no kind": [{}],
    "a key that is a list": [{"dict": [[[1], 2]]}],
    "a dict of numbers": [{"dict": [1]}],
    "bytes that are not there": [b"\xc6\x7f\xff\xff\xff"],
    "text that is not there": [b"\xdb\x7f\xff\xff\xff"],
    "items that are not there": [b"\xdd\xff\xff\xff\xff"],
    "entries that are not there": [b"\xdf\xff\xff\xff\xff"],
    "lists within each other that are not there": [b"\xdc\x0b\xb8" * 1000],
    "bytes after the end": [1, b"a"],
    "a type of MessagePack's": [msgpack.ExtType(5, b"a")],
    "a time of MessagePack's": [msgpack.Timestamp(1)],
    "an int that is none": [{"int": ["x"]}],
}  # fmt: skip


@pytest.mark.parametrize("parts", DAMAGED.values(), ids=DAMAGED)
def test_what_is_not_as_dtk_writes_it_is_not_read(parts, capfd):
    with pytest.raises(CommunicatorError, match="(?s)cannot be read.*start all with the same"):
        loads(written(*parts), {})
    assert "ran" not in capfd.readouterr().out


def memory_for(payload):
    tracemalloc.start()
    try:
        return read_or_refused(payload), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "what",
    [
        *("more elements than bytes", "elements without bytes", "more objects than there are"),
        *("bytes that are not there", "text that is not there", "items that are not there"),
        *("entries that are not there", "lists within each other that are not there"),
    ],
)
def test_a_claim_takes_no_memory(what):
    found, memory = memory_for(written(*DAMAGED[what]))
    assert isinstance(found, CommunicatorError) and memory < 1e6


def test_a_value_takes_memory_in_proportion_to_what_came():
    payload = dumps([np.zeros(10**6, "f4"), b"x" * 10**6], {})
    found, memory = memory_for(payload)
    assert len(found) == 2 and memory < 4 * len(payload)


def test_a_record_as_dtk_writes_it_is_read():
    """What is refused above differs from this."""
    assert loads(written(record(*place(Failure), **FAILURE)), {}) == Failure(0, "", "", None)
    payload = written(record(*place(Dense), dtype="float16", factors=True))
    assert loads(payload, {}) == Dense("float16")


@pytest.mark.parametrize(
    "body",
    [
        *(b"\x91" * 100_000 + b"\x90", b"\x81\xa5tuple\x91" * 50_000 + b"\x90", b"", b"\x92\1"),
        *(b"\xc1", b"\xa1\xff"),
    ],
    ids=["deep", "deep kinds", "empty", "half", "no type", "no text"],
)
def test_damaged_data_are_not_read(body):
    with pytest.raises(CommunicatorError, match="cannot be read"):
        loads(b"od" + body, {})


def read_or_refused(payload):
    try:
        return loads(payload, {})
    except CommunicatorError as refused:
        return refused


@given(st.binary(), st.sampled_from([b"", b"o", b"od", b"op", b"s"]))
def test_any_bytes_are_read_or_refused(body, start):
    read_or_refused(start + body)


VALID = [
    dumps(value, {})
    for value in (
        {"a": [1, 2.5, None, True], 3: ("x", {1, 2})},
        [np.arange(3, dtype="f4"), np.array(["ab", "c"]), np.array([None, 1]), np.float64(1)],
        [tf.constant([1, 2]), tf.ragged.constant([[1], [2, 3]]), tf.TensorSpec([None], tf.string)],
        [RoundMessage("at", 1, failure=Failure.of(OSError(2, "no", "file"), 0)), KeyError(1)],
        [datetime.datetime(2024, 1, 2), datetime.timedelta(1), pathlib.Path("a"), 2**80, 1j],
    )
]
CHANGES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4)


@settings(max_examples=300)
@given(st.sampled_from(VALID), CHANGES, st.integers(0, 400))
def test_changed_payloads_are_read_or_refused(payload, changes, kept):
    changed = bytearray(payload)
    for place, byte in changes:
        changed[2 + place % (len(payload) - 2)] = byte
    read_or_refused(bytes(changed))
    read_or_refused(payload[: min(kept, len(payload) - 1)])


@pytest.mark.parametrize("payload", VALID, ids=range(len(VALID)))
def test_a_payload_that_was_cut_is_refused(payload):
    for kept in range(len(payload)):
        with pytest.raises(CommunicatorError):
            loads(payload[:kept], {})


def test_the_constructors_of_records_keep_or_refuse():
    """A record may come from anybody: none of dtk's does anything else when it is made."""
    known = {
        "bench/results.py", "cluster/tf_config.py", "communicators/costs.py",
        "communicators/shard.py", "exchange/delayed.py", "exchange/dense.py",
        "exchange/downpour.py", "exchange/local_steps.py", "exchange/quantized.py",
        "exchange/warm_start.py", "launch/job_run.py", "parameter_server/consistency_models.py",
        "parameter_server/job_context.py",
        "search/study.py", "trainer/tracing/traced_step.py",
    }  # fmt: skip
    package = pathlib.Path(dtk.__file__).parent
    making = re.compile(r"def __(post_init|del)__\(")
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if making.search(path.read_text())
    }
    assert found == known, "look at what the new one does, then add it here"
