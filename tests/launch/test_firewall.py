"""A firewall of dtk's: a job's hosts reach its ports, and no other host does."""

import shlex
import shutil
import subprocess
import sys

import pytest

from dtk.errors import ClusterError
from dtk.launch.network import rules

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


@pytest.mark.skipif(
    shutil.which("nft", path="/usr/sbin:/sbin") is None, reason="rules are applied by nftables"
)
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
            said, _ = start(0, "nft", "-f", "-").communicate(rules(addresses[:2]), timeout=30)
            assert said == ""
        assert reached() == ["yes", "yes", "no"]
        start(0, "nft", "delete", "table", "inet", "dtk").communicate(timeout=30)
        assert reached() == ["yes", "yes", "yes"]
        server.stdin.close()
