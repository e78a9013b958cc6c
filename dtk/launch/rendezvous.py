"""Horovod's HTTP server, by which ranks of a job over Gloo find each other.

The launcher runs it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

from dtk.errors import CommunicatorError
from dtk.launch import local
from dtk.launch.plan import Process


class Rendezvous:
    """A running rendezvous server."""

    def __init__(self, processes: Sequence[Process]) -> None:
        try:
            from horovod.runner.common.util.hosts import SlotInfo
            from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
        except ImportError as error:
            raise CommunicatorError(
                f"communicator horovod: Horovod is not installed ({error}); run `dtk "
                "install-horovod`"
            ) from None
        address = own_address([process.host for process in processes])
        # RendezvousServer.start() would listen on every interface; this is the same server on one.
        self._server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
        self._server.daemon_threads = True
        self._server.init(
            [
                SlotInfo(
                    process.env["HOROVOD_HOSTNAME"],
                    *(
                        int(process.env[f"HOROVOD_{name}"])
                        for name in (
                            "RANK",
                            "LOCAL_RANK",
                            "CROSS_RANK",
                            "SIZE",
                            "LOCAL_SIZE",
                            "CROSS_SIZE",
                        )
                    ),
                )
                for process in processes
            ]
        )
        self.env = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._server.server_address[1]),
        }
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def is_needed(processes: Sequence[Process]) -> bool:
    """Return whether a plan's processes expect a rendezvous server.

    >>> is_needed([])
    False
    """
    return any(process.env.get("HOROVOD_CONTROLLER") == "gloo" for process in processes)


def own_address(hosts: Sequence[str]) -> str:
    """Return the address of this machine that all hosts can reach."""
    remote = [host for host in hosts if not local.is_local(host)]
    if not remote:
        return "127.0.0.1" if all(map(local.is_loopback, hosts)) else socket.gethostbyname(hosts[0])
    # Connecting a UDP socket sends nothing; it asks the routing table which address would be used.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((remote[0], 9))
        return str(probe.getsockname()[0])
