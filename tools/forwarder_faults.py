"""Reset the connections of a training whose two hosts reach each other through a forwarder.

    python tools/forwarder_faults.py --trials 3 --seed 7

Two network namespaces are the hosts. Each knows the other by a name that means a forwarder, a
thread of this process, as where machines sit behind a proxy or a load balancer. `TF_CONFIG` names
both; no launcher watches them. At a random moment the forwarder resets every connection through it.

Both ranks must end within a minute: with the weights of a training that nothing happened to, or
with an error that names a rank. The exit code is 1 otherwise, 2 where hosts cannot be made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import link_faults as links
import numpy as np

NAMES = ("rank0.test", "rank1.test")
END = 60.0
NOW = struct.pack("ii", 1, 0)  # of SO_LINGER: closing resets the connection


class Forwarder(threading.Thread):
    """Passes connections on to a host, at the same port, from an address of its own.

    Args:
        gate: The address.
        hosts: Where to pass on to; each gets a free port.
    """

    def __init__(self, gate: str, hosts: list[str]) -> None:
        super().__init__(name="forwarder", daemon=True)
        self.doors = [socket.create_server((gate, 0)) for _ in hosts]
        self.ports = [door.getsockname()[1] for door in self.doors]
        self._hosts = hosts
        self._loop = asyncio.new_event_loop()
        self._ends: set[asyncio.StreamWriter] = set()

    def run(self) -> None:
        """Pass on until `stop`."""
        for door, host, port in zip(self.doors, self._hosts, self.ports, strict=True):

            async def accept(
                near: asyncio.StreamReader,
                back: asyncio.StreamWriter,
                target: tuple[str, int] = (host, port),
            ) -> None:
                with contextlib.suppress(OSError):
                    far, out = await asyncio.open_connection(*target)
                    await asyncio.gather(self._pump(near, out), self._pump(far, back))
                    return
                back.close()

            self._loop.run_until_complete(asyncio.start_server(accept, sock=door))
        self._loop.run_forever()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        self._ends.add(sink)
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        self._ends.discard(sink)
        sink.close()

    def reset(self) -> int:
        """Reset all connections; return how many ends there were."""
        done: list[int] = []
        over = threading.Event()

        def strike() -> None:
            ends = list(self._ends)
            for end in ends:
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NOW)
                end.transport.abort()
            done.append(len(ends))
            over.set()

        self._loop.call_soon_threadsafe(strike)
        over.wait(10)
        return sum(done)

    def stop(self) -> None:
        """Take no more connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join(10)


def main() -> int:
    """Reset the connections of some trainings; say what became of each."""
    parser = argparse.ArgumentParser(description="Reset connections that pass a forwarder.")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    asked = parser.parse_args()
    if os.getuid() != 0 or shutil.which("ip") is None:
        print("needs root and iproute2 (apt-get install iproute2)", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    print(f"seed {asked.seed}", flush=True)
    chance, wrong = random.Random(asked.seed), 0
    whole: np.ndarray | None = None
    with tempfile.TemporaryDirectory(prefix="dtk-forwarder-") as made:
        script = Path(made, "train.py")
        script.write_text(links.SCRIPT.replace("EPOCHS", str(links.EPOCHS)))
        for number in range(asked.trials + 1):
            folder = Path(made, str(number))
            folder.mkdir()
            said, fine = trial(script, folder, chance if number else None, whole)
            if not number and fine:
                whole = np.load(folder / "weights.npy")
            print(f"{'reset' if number else 'none':6} {said}", flush=True)
            wrong += not fine
    print("nothing was wrong" if not wrong else f"{wrong} of these were wrong")
    return int(wrong > 0)


def trial(
    script: Path, folder: Path, chance: random.Random | None, whole: np.ndarray | None
) -> tuple[str, bool]:
    """Train on two new hosts; reset their connections, if by chance."""
    with links.hosts.hosts(2) as (addresses, shell):
        names = [links.output(shell, address, "hostname").strip() for address in addresses]
        gate = addresses[0].rpartition(".")[0] + ".254"
        for own, name in enumerate(names):
            known = Path("/etc/netns", name, "hosts")
            means = [addresses[n] if n == own else gate for n in range(2)]
            lines = [f"{address} {one}" for address, one in zip(means, NAMES, strict=True)]
            known.write_text(known.read_text() + "\n".join([*lines, ""]))
        forwarder = Forwarder(gate, addresses)
        forwarder.start()
        with contextlib.ExitStack() as ranks:
            ranks.callback(forwarder.stop)
            jobs = []
            for rank, address in enumerate(addresses):
                cluster = [f"{n}:{port}" for n, port in zip(NAMES, forwarder.ports, strict=True)]
                task = {"type": "worker", "index": rank}
                config = json.dumps({"cluster": {"worker": cluster}, "task": task})
                told = ranks.enter_context((folder / f"said-{rank}").open("w"))
                job = subprocess.Popen(
                    [shell, address, f"exec {sys.executable} {script} {folder}"],
                    env={**os.environ, "TF_CONFIG": config, "DTK_STALL_TIMEOUT": "15"},
                    stdout=told,
                    stderr=told,
                )
                ranks.callback(job.wait)
                ranks.callback(job.kill)
                jobs.append(job)
            return watched(jobs, forwarder, folder, chance, whole)


def watched(
    jobs: list[subprocess.Popen[bytes]],
    forwarder: Forwarder,
    folder: Path,
    chance: random.Random | None,
    whole: np.ndarray | None,
) -> tuple[str, bool]:
    """Reset the connections once both ranks train, and see what comes of it."""
    deadline = time.monotonic() + links.START
    while not all((folder / f"rank-{rank}").exists() for rank in range(2)):
        if time.monotonic() > deadline or any(job.poll() is not None for job in jobs):
            return f"does not start: {said(folder)[-2000:]}", False
        time.sleep(0.05)
    struck, ends = time.monotonic(), 0
    if chance is not None:
        time.sleep(chance.uniform(1.0, 6.0))
        struck, ends = time.monotonic(), forwarder.reset()
    codes = []
    for job in jobs:
        try:
            codes.append(job.wait(max(0.1, struck + END - time.monotonic())))
        except subprocess.TimeoutExpired:
            return f"{ends} ends reset: hangs", False
    took = f"{ends} ends reset, {time.monotonic() - struck:.1f} s: exit codes {codes}"
    if codes == [0, 0]:
        found = np.load(folder / "weights.npy")
        return f"{took}, trained on", whole is None or np.array_equal(found, whole)
    named = re.search(r"^dtk: .*rank \d.*$|^rank \d.*$|.*task:\d.*", said(folder), re.MULTILINE)
    return f"{took}: {named[0].strip()[:120] if named else 'no rank named'}", named is not None


def said(folder: Path) -> str:
    """Return what both ranks have said."""
    return "".join((folder / f"said-{rank}").read_text() for rank in range(2))


if __name__ == "__main__":
    sys.exit(main())
