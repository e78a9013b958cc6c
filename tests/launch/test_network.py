"""Only a job's own processes reach its ports: by a network of its own, or behind a firewall."""

import os
import shlex
import shutil
import socket
import subprocess
import sys

import pytest

from dtk.errors import ClusterError
from dtk.launch.network import rules

from support.launched import RING, dtk_run

pytestmark = pytest.mark.command

NFT = shutil.which("nft", path="/usr/sbin:/sbin")  # where a user's PATH often does not lead
LISTENS = """
import socket, sys
server = socket.create_server(("0.0.0.0", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""
REACHES = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)
except TimeoutError:
    print("no")
else:
    print("yes")
"""


def test_rules_name_every_address_and_both_kinds():
    lines = rules(["192.0.2.7", "2001:db8::7", "192.0.2.8"]).splitlines()
    assert "    ip saddr { 192.0.2.7, 192.0.2.8 } accept" in lines
    assert "    ip6 saddr { 2001:db8::7 } accept" in lines


@pytest.mark.parametrize("host", ["127.0.1.1", "::1", "localhost"])
def test_a_name_that_means_loopback_lets_no_other_host_in(host):
    with pytest.raises(ClusterError, match=r"on which no other host is reached; give the address"):
        rules(["192.0.2.7", host])


def test_a_name_without_an_address_is_refused():
    with pytest.raises(ClusterError, match=r"nowhere\.invalid.* means no address"):
        rules(["nowhere.invalid"])


@pytest.mark.skipif(NFT is None, reason="rules are applied by nftables")
def test_a_stranger_reaches_no_port_and_the_job_s_hosts_do(many_hosts):
    addresses, shell = many_hosts(3)

    def start(host, *command):
        return subprocess.Popen(
            [shell, addresses[host], shlex.join(command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def reached():
        command = (sys.executable, "-c", REACHES, addresses[0], port)
        asked = [start(host, *command) for host in range(3)]
        return [one.communicate(timeout=30)[0].strip() for one in asked]

    with start(0, sys.executable, "-c", LISTENS) as server:
        port = server.stdout.readline().strip()
        assert reached() == ["yes", "yes", "yes"]
        for _ in range(2):  # again, as where the hosts of jobs have changed
            said, _ = start(0, NFT, "-f", "-").communicate(rules(addresses[:2]), timeout=30)
            assert said == ""
        assert reached() == ["yes", "yes", "no"]
        start(0, NFT, "delete", "table", "inet", "dtk").communicate(timeout=30)
        assert reached() == ["yes", "yes", "yes"]
        server.stdin.close()


ISOLATED = """
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
        [sys.executable, "-c", ISOLATED, str(user)],
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
    script.write_text(f"{RING}print(*[name for _, name in socket.if_nameindex()])")
    done = dtk_run("-n", "2", "--isolate", "--communicator", "collective", script)
    if "this system gives user" in done.stderr:
        pytest.skip("network namespaces are not allowed here")
    met = [f"[{r}] {what}" for r in (0, 1) for what in (f"heard {1 - r} on 127.0.0.1", "lo")]
    assert sorted(done.stdout.splitlines()) == met, done.stderr
