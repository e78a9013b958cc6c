"""Rules by which a host lets only the hosts of a job reach the ports that jobs listen on.

TensorFlow's gRPC server listens on every interface of its host, without a password. On one machine
`dtk run --isolate` keeps others out; between machines a firewall does.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path

from dtk.cluster.slurm import PORTS
from dtk.errors import ClusterError

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_TABLE = """\
# Only {names} reach the ports of jobs on this host. As root on each of them: nft -f FILE
# To take it back: nft delete table inet dtk
table inet dtk
delete table inet dtk
table inet dtk {{
  chain input {{
    type filter hook input priority filter; policy accept;
    iif lo accept
    ct state established,related accept
{accepted}
    tcp dport {{ {ports} }} drop
  }}
}}
"""


def rules(hosts: Sequence[str]) -> str:
    """Write nftables' rules that close the ports of jobs to all but these hosts.

    Closed are the ports that the kernel gives out, which `dtk run` and MPI take, and those of Slurm
    steps. Connections that are there already, loopback, and all other ports stay as they are.

    Example:
        >>> print(rules(["192.0.2.1", "192.0.2.2"]).splitlines()[9])
            ip saddr { 192.0.2.1, 192.0.2.2 } accept
    """
    found = sorted({address for host in hosts for address in _addresses(host)}, key=str)
    accepted = [
        f"    {family} saddr {{ {', '.join(str(one) for one in chosen)} }} accept"
        for family, version in (("ip", 4), ("ip6", 6))
        if (chosen := [one for one in found if one.version == version])
    ]
    low, high = _RANGE.read_text().split()
    return _TABLE.format(
        names=", ".join(hosts),
        accepted="\n".join(accepted),
        ports=f"{PORTS.start}-{PORTS.stop - 1}, {low}-{high}",
    )


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        told = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ClusterError(f"host {host!r} means no address ({error}); give its address") from error
    found = [ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in told]
    if any(one.is_loopback for one in found):
        raise ClusterError(
            f"host {host!r} means {found[0]} here, on which no other host is reached; give the "
            "address by which the others know it"
        )
    return found
