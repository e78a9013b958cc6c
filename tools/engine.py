"""An engine of the plainest kind: it starts ranks by torchrun's variables, and only awaits them.

    python tools/engine.py 2 script.py ...
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def main(size: int, command: list[str]) -> int:
    """Start so many ranks; return the first exit code that is not 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    told["LOCAL_WORLD_SIZE"] = str(size)
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]
    codes = [rank.wait() for rank in ranks]
    return next((code % 256 for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
