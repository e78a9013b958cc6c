"""Whatever stands where dtk reads what others wrote: it is read, or refused by an error of dtk's.

What once came through, or raised from inside, stays here as an example.
"""

from __future__ import annotations

import json
import os
import socket

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dtk.bench import results
from dtk.cluster import hostfile, slurm, stall, tf_config
from dtk.cluster.line import Line
from dtk.errors import DtkError
from dtk.launch import assign
from dtk.launch.ssh import HostFacts
from dtk.launch.task import Task

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["", "worker", "chief", "count", "0", "a"]), inner)
    ),
    max_leaves=12,
)
DEEP = "[" * 100_000


def is_read_or_refused(read, *given):
    try:
        read(*given)
    except DtkError as error:
        assert str(error)


@given(st.text(st.sampled_from('worker[]{}()",:0123456789 -\n\x00.x'), max_size=60) | JSON)
@example(DEEP)
@example('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1e999}}')
@example("9" * 5000)
@example("n[0-99999999999999999]")
@example("2(x999999999)")
@example("a[1-60000]b[1-60000]")
def test_launchers_variables_and_hostfiles(value):
    text = value if isinstance(value, str) else json.dumps(value)
    is_read_or_refused(tf_config.parse, text)
    is_read_or_refused(slurm.expand_nodelist, text)
    is_read_or_refused(slurm.expand_tasks_per_node, text)
    is_read_or_refused(hostfile.parse_hostfile, text)
    is_read_or_refused(hostfile.parse_hosts, text)


@given(JSON, JSON)
def test_a_cluster_and_a_task_of_any_shape(cluster, task):
    is_read_or_refused(tf_config.parse, json.dumps({"cluster": cluster, "task": task}))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | JSON)
@example(DEEP.encode())
@example({"dtk bench": 3, "setting": {}, "parameters": {}, "turns": {"a": {"b": [[None]]}}})
def test_a_saved_benchmark(tmp_path, value):
    told = value if isinstance(value, bytes) else json.dumps({"dtk bench": 3, "turns": value})
    file = tmp_path / "run.json"
    file.write_bytes(told if isinstance(told, bytes) else told.encode())
    is_read_or_refused(results.read, file)


class Ended:
    """A process that has ended, for a rank that is only spoken of."""

    pid = 0


@given(st.text(max_size=40) | JSON)
@example(DEEP)
@example({"time": 1e308 * 10, "error": 1, "message": [], "file": "", "line": 9, "lost_peer": 0})
@example({"count": 1, "inside": True, "what": "a", "still": "x", "cpu": 0, "io": 0, "stack": ""})
@example({"count": 1, "inside": True, "what": "a", "still": 1e308 * 10, "cpu": 0, "io": 0})
def test_a_line_that_looks_like_a_ranks_report(value):
    (process,) = assign(["python"], workers=1, survey=lambda host, ports: FACTS)
    rank = Task(process, {}, False, Ended())
    for _ in range(2):
        rank.hear((value if isinstance(value, str) else json.dumps(value)).encode())
        rank.hear(json.dumps({"progress": value}).encode())
        rank.hear(json.dumps({"usage": value}).encode())
        rank.hear(json.dumps({"failure": value}).encode())
        rank.hear(json.dumps({"saving": value}).encode())
    assert stall.find([rank.status], 1e9, 1.0) is None or rank.status.last is not None


FACTS = HostFacts((1,), (0,), "lo")


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_who_does_not_know_the_secret_is_no_rank(chunks):
    """Bytes of anybody reach the port: no message, no rank, no exception of another kind."""
    near, far = socket.socketpair()
    with near, far:
        line = Line(near, b"secret", b"nonces", is_listener=True)
        far.sendall(b"\n".join(chunks) + b"\n")
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError):
            while True:
                line.receive()


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_changed_message_is_refused(where, by):
    near, far = socket.socketpair()
    listener = Line(near, b"secret", b"nonces", is_listener=True)
    client = Line(far, b"secret", b"nonces", is_listener=False)
    with near, far:
        client.send({"rank": 1})
        told = bytearray(near.recv(1 << 16))
        told[where % (len(told) - 1)] ^= by
        if b"\n" in told[:-1]:
            return  # two messages, of which the first is refused like those above
        far.sendall(told)
        with pytest.raises(PermissionError):
            listener.receive()


def test_a_folder_where_a_benchmark_should_be(tmp_path):
    is_read_or_refused(results.read, tmp_path)
    os.mkfifo(tmp_path / "pipe")
