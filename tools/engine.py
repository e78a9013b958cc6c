"""An engine of the plainest kind: it starts ranks by torchrun's variables, and awaits them.

It ends none that could end by itself: once a rank has failed, it kills those that are stopped.

    python tools/engine.py 2 script.py ...
"""

from __future__ import annotations

import os
import socket
import sys
import time

import psutil


def main(size: int, command: list[str]) -> int:
    """Start so many ranks; return the first exit code that is not 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    told |= {"LOCAL_WORLD_SIZE": str(size), "DTK_START_TIMEOUT": "30"}
    ranks = [
        psutil.Popen(
            [sys.executable, *command],
            env={**os.environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]
    codes: list[int | None] = [None]
    while None in codes:
        time.sleep(0.2)
        codes = [rank.poll() for rank in ranks]
        for rank, code in zip(ranks, codes, strict=True):
            if code is None and any(codes) and rank.status() == psutil.STATUS_STOPPED:
                rank.kill()
    return next((code % 256 for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
