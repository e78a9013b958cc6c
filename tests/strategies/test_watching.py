"""Ranks that watch each other where `dtk run` does not: the missing one is named, and all end."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from dtk.cluster.heartbeats import Listener, connect
from dtk.cluster.line import Line
from dtk.errors import ClusterError
from dtk.strategies import start

# The connection.


def meet(secret_of=lambda secret: secret):
    listener = Listener("127.0.0.1")
    found = []

    def knock():
        found.append(connect(1, ["127.0.0.1"], listener.port, secret_of(listener.secret)))

    thread = threading.Thread(target=knock)
    thread.start()
    clients = listener.accept_clients(2, 3.0)
    thread.join()
    return clients, found[0]


def hang_up(*lines):
    for line in lines:
        line.end.close()


def test_messages_pass_both_ways_in_order():
    clients, line = meet()
    for number in range(3):
        line.send({"number": number})
        clients[1].send({"number": -number})
    time.sleep(0.1)
    assert [message["number"] for message in clients[1].receive()] == [0, 1, 2]
    assert [message["number"] for message in line.receive()] == [0, -1, -2]
    hang_up(line, clients[1])


def test_messages_that_came_together_are_read_one_by_one():
    """Who waited for one lost those behind it."""
    clients, line = meet()
    for number in range(2):
        line.send({"number": number})
    time.sleep(0.1)
    assert [clients[1].receive_one(3.0)["number"] for _ in range(2)] == [0, 1]
    hang_up(line, clients[1])


def test_who_does_not_know_the_secret_is_not_let_in():
    assert meet(lambda secret: bytes(32)) == ({}, None)


def test_a_message_that_was_said_before_is_refused():
    ours, theirs = socket.socketpair()
    line = Line(ours, b"secret", b"nonces", is_listener=True)
    said = Line(theirs, b"secret", b"nonces", is_listener=False)
    said.send({"rank": 1})
    once = ours.recv(1000, socket.MSG_PEEK)
    theirs.sendall(once)
    with pytest.raises(PermissionError):
        line.receive()
    hang_up(line, said)


def test_what_a_timeout_may_be(monkeypatch):
    monkeypatch.delenv("DTK_STALL_TIMEOUT", raising=False)
    assert [start.checked_timeout(given) for given in (None, 0, 7)] == [300.0, 0.0, 7.0]
    with pytest.raises(ValueError, match=r"stall_timeout=0\.5: expected 1 to 1000000 seconds"):
        start.checked_timeout(0.5)
    monkeypatch.setenv("DTK_STALL_TIMEOUT", "60")
    assert start.checked_timeout(None) == 60.0
    for wrong in ("soon", "nan", "-1"):
        monkeypatch.setenv("DTK_STALL_TIMEOUT", wrong)
        with pytest.raises(ClusterError, match="DTK_STALL_TIMEOUT='" + wrong):
            start.checked_timeout(None)
