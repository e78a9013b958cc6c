"""Keeping others from the ports of a job: a network of its own, or a firewall between hosts.

TensorFlow's gRPC server listens on every interface of its host, without a password. In a network
namespace that has loopback alone, every interface is loopback. Linux gives one to root, and to
other users inside a user namespace, where the system allows these. Between machines a firewall lets
only the hosts of a job reach the ports that jobs listen on.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from dtk.cluster.slurm import PORTS
from dtk.errors import ClusterError

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # of linux/sched.h
_SET_FLAGS, _UP = 0x8914, 0x1  # of linux/sockios.h, linux/if.h
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


def isolate() -> None:
    """Move this process, and all that it starts from now on, to a network of its own.

    Called before any thread is started: others would stay where they are.

    >>> isolate()  # doctest: +SKIP
    >>> [name for _, name in socket.if_nameindex()]  # doctest: +SKIP
    ['lo']
    """
    user, group, flags = os.getuid(), os.getgid(), _NEW_NETWORK
    if user != 0:
        flags |= _NEW_USER
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        why = os.strerror(ctypes.get_errno())
        raise ClusterError(
            f"--isolate: this system gives user {user} no network of its own ({why}); start the "
            "job as root, allow user namespaces (sysctl user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns), or use --communicator horovod, which "
            "listens on loopback alone"
        )
    if user != 0:
        for file, text in (
            ("uid_map", f"{user} {user} 1"),
            ("setgroups", "deny"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{file}", "w") as opened:
                opened.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))


def rules(hosts: Sequence[str]) -> str:
    """Write nftables' rules that close the ports of jobs to all but these hosts.

    Closed are the ports that the kernel gives out, which `dtk run` and MPI take, and those of Slurm
    steps. Connections that are there already, loopback, and all other ports stay as they are.

    Example:
        >>> print(rules(["192.0.2.1", "192.0.2.2"]).splitlines()[9])
            ip saddr { 192.0.2.1, 192.0.2.2 } accept
    """
    addresses = sorted({address for host in hosts for address in _addresses(host)}, key=str)
    accepted = [
        f"    {family} saddr {{ {', '.join(str(one) for one in chosen)} }} accept"
        for family, version in (("ip", 4), ("ip6", 6))
        if (chosen := [one for one in addresses if one.version == version])
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
    addresses = [ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in told]
    if any(one.is_loopback for one in addresses):
        raise ClusterError(
            f"host {host!r} means {addresses[0]} here, on which no other host is reached; give the "
            "address by which the others know it"
        )
    return addresses
