"""Ranks of several hosts that a Horovod as published would join on loopback are refused."""

import importlib.util
import socket

import pytest

from dtk.cluster.place import Place
from dtk.errors import CommunicatorError

horovod = pytest.importorskip("dtk.communicators.horovod", reason="run `dtk install-horovod`")


@pytest.fixture
def host(monkeypatch):
    """A host of two, whose own name means 127.0.1.1."""

    def host(patched=False, local_size="1", address="127.0.1.1"):
        monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
        monkeypatch.setenv("HOROVOD_SIZE", "2")
        monkeypatch.setenv("HOROVOD_LOCAL_SIZE", local_size)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: patched or None)
        monkeypatch.setattr(socket, "gethostbyname", lambda name: address)
        horovod._check_own_address(Place("horovod", 1, 2))

    return host


def test_it_is_named_with_what_helps_and_what_works_is_let_through(host):
    with pytest.raises(CommunicatorError, match=r"rank 1.*means 127\.0\.1\.1 here.*/etc/hosts"):
        host()
    host(patched=True)
    host(local_size="2")
    host(address="10.0.0.1")
