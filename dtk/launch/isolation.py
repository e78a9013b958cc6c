"""A network of its own for a job on this machine, which nothing outside it can reach.

TensorFlow's gRPC server listens on every interface of the host, without a password. In a network
namespace that has loopback alone, every interface is loopback. Linux gives one to root, and to
other users inside a user namespace, where the system allows these.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

from dtk.errors import ClusterError

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # of linux/sched.h
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # of linux/sockios.h, linux/if.h
_LOOPBACK = b"lo"


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
        request = struct.pack("16sh14x", _LOOPBACK, 0)
        before = struct.unpack("16sh14x", fcntl.ioctl(control, _GET_FLAGS, request))[1]
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh14x", _LOOPBACK, before | _UP))
