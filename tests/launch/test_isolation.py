"""A job with a network of its own: nothing outside reaches it, its ranks reach each other."""

import os
import socket
import subprocess
import sys

import pytest

LISTENS = """
import ctypes, encodings.idna, os, socket, sys
from dtk.launch.network import isolate
user = int(sys.argv[1])
if user:
    os.setgid(user)
    os.setuid(user)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as of what this user starts
isolate()
assert os.getuid() == user
server = socket.create_server(("0.0.0.0", 0))
with socket.create_connection(("127.0.0.1", server.getsockname()[1])):
    names = [name for _, name in socket.if_nameindex()]
    print(server.getsockname()[1], *names, flush=True)
sys.stdin.read()
"""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")


@needs_root
@pytest.mark.parametrize("user", [0, 65534], ids=["root", "another user"])
def test_who_is_outside_reaches_nothing(user):
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS, str(user)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        said = process.stdout.readline().split()
        if not said and "this system gives user" in process.stderr.read():
            pytest.skip("network or user namespaces are not allowed here")
        assert said[1:] == ["lo"]
        for host in ("127.0.0.1", socket.gethostname()):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, int(said[0])), timeout=5)
        process.stdin.close()


@needs_root
def test_ranks_under_dtk_run_reach_each_other(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os, socket\n"
        "config = json.loads(os.environ['TF_CONFIG'])\n"
        "hosts = [w.rpartition(':') for w in config['cluster']['worker']]\n"
        "rank = config['task']['index']\n"
        "server = socket.create_server((hosts[rank][0], int(hosts[rank][2])))\n"
        "while True:\n"
        "    try:\n"
        "        link = socket.create_connection((hosts[1 - rank][0], int(hosts[1 - rank][2])))\n"
        "        break\n"
        "    except ConnectionRefusedError:\n"
        "        pass\n"
        "server.accept()\n"
        "print('met on', *[name for _, name in socket.if_nameindex()])\n"
    )
    command = [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", "--isolate"]
    done = subprocess.run(
        [*command, "--communicator", "collective", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "this system gives user" in done.stderr:
        pytest.skip("network namespaces are not allowed here")
    assert sorted(done.stdout.splitlines()) == ["[0] met on lo", "[1] met on lo"], done.stderr
