"""Slow down, cut and reset the link between two hosts while they train; say what jobs make of it.

    python tools/link_faults.py                         # all faults with all communicators
    python tools/link_faults.py cut reset --communicator collective --seed 7

Two namespaces are the hosts, with a network and processes of their own, and one rank on each. `dtk
run` runs on the first and reaches the second by a remote shell over the same link
(benchmarks/tcp_shell.py). At a random moment of `fit`:

    slow        the link carries 1 Mbit/s from then on
    outage      the link is down for 5 s
    partition   the link is down for 10 s
    cut         the link is down for good, as when its cable is pulled
    reset       every TCP connection between the ranks is reset, and that of the remote shell stays
    shell       the remote shell's connection is reset, and those between ranks stay

A job over a slow link must end with the weights of one that nothing happened to. After any other
fault it does that too, or ends within 60 s and names a rank with its host; after a cut nothing else
is possible, and the rank is the one beyond it. 130 s after the fault no process may be left on
either host.
The exit code is 1 if anything was otherwise, 2 where hosts cannot be made (root, iproute2). Every
random choice follows from the seed, which is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import hosts  # noqa: E402
import tcp_shell  # noqa: E402

from dtk.cluster import mpi_installs  # noqa: E402

BIN = Path(sys.executable).parent
STALL = 15.0
START = 120.0  # seconds until both ranks train
# The stall timeout, what the launcher allows ranks that are asked to end, and a busy machine.
END = STALL + 45.0
# `dtk.launch.ssh.SILENCE`, 5 s of grace, what dtk allows MPI's server, and a busy machine.
GONE = 130.0
WHOLE = 240.0  # seconds a training may take that goes on
EPOCHS = 60
SCRIPT = """
import pathlib, sys, time
import dtk, keras, numpy as np
folder = pathlib.Path(sys.argv[1])
strategy = dtk.auto_strategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    layers = [keras.layers.Dense(16, activation="relu", name="a"), keras.layers.Dense(1, name="b")]
    model = keras.Sequential([keras.Input((20,)), *layers])
    model.compile("adam", "mse")
class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        (folder / f"rank-{strategy.rank}").touch()
        time.sleep(0.02)
x = np.random.default_rng(0).normal(size=(256, 20)).astype("float32")
model.fit(x, x[:, :1] ** 2, epochs=EPOCHS, batch_size=16, verbose=0, callbacks=[Tell()])
if strategy.rank == 0:
    np.save(folder / "weights.npy", np.concatenate([w.ravel() for w in model.get_weights()]))
"""
NAMED = re.compile(r"^.*\brank \d+, host \S+.*$", re.MULTILINE)


class Link:
    """The link of the second of two hosts.

    Args:
        addresses: Of both.
        shell: Reaches them past their network.
    """

    def __init__(self, addresses: list[str], shell: str) -> None:
        self.addresses, self.shell = addresses, shell
        self.names = [output(shell, address, "hostname").strip() for address in addresses]
        self._device = f"{self.names[1][:-1]}v{self.names[1][-1]}"  # as benchmarks/hosts.py does

    def down(self) -> None:
        """Pull the cable."""
        output("ip", "link", "set", self._device, "down")

    def up(self) -> None:
        """Put it back."""
        output("ip", "link", "set", self._device, "up")

    def slow(self) -> None:
        """Let 1 Mbit/s through, each way."""
        for where in ([], ["ip", "netns", "exec", self.names[1]]):
            device = "eth0" if where else self._device
            limit = ["root", "tbf", "rate", "1mbit", "burst", "16kb", "latency", "200ms"]
            output(*where, "tc", "qdisc", "add", "dev", device, *limit)

    def reset(self, *which: str) -> int:
        """Reset the second host's connections to the first.

        Args:
            which: A filter of ss's.

        Returns:
            How many there were.
        """
        command = ["ip", "netns", "exec", self.names[1], "ss", "-t", "-H"]
        peer = ["state", "established", "dst", self.addresses[0], *which]
        found = len(output(*command, *peer).splitlines())
        output(*command, "-K", *peer)
        left = len(output(*command, *peer).splitlines())
        if left == found:
            print("ss -K resets nothing: a kernel without CONFIG_INET_DIAG_DESTROY", flush=True)
        return found - left

    def pids(self) -> set[int]:
        """Return the processes that use the network of either host."""
        told = [output("ip", "netns", "pids", name) for name in self.names]
        return {int(word) for word in " ".join(told).split()}


def outage(seconds: float) -> Callable[[Link], None]:
    """Return a fault: the link is down for a while."""

    def strike(link: Link) -> None:
        link.down()
        time.sleep(seconds)
        link.up()

    return strike


def reset_ranks(link: Link) -> None:
    """Reset all connections but the remote shell's."""
    print(f"    connections reset: {link.reset(f'( sport != :{tcp_shell.PORT} )')}", flush=True)


def reset_shell(link: Link) -> None:
    """Reset the remote shell's connections."""
    print(f"    connections reset: {link.reset(f'( sport = :{tcp_shell.PORT} )')}", flush=True)


FAULTS: dict[str, Callable[[Link], None]] = {
    "slow": Link.slow,
    "outage": outage(5.0),
    "partition": outage(10.0),
    "cut": Link.down,
    "reset": reset_ranks,
    "shell": reset_shell,
}


class Outcome(NamedTuple):
    """What came of one fault.

    Attributes:
        what: For the table.
        end: Seconds from the fault to the end of the job.
        gone: Seconds from the fault to the end of the last process on a host.
        wrong: What must not be.
    """

    what: str
    end: float
    gone: float
    wrong: tuple[str, ...]


def main() -> int:
    """Strike the link in every way asked for, and print a table."""
    parser = argparse.ArgumentParser(description="Disturb the link between two training hosts.")
    parser.add_argument("fault", nargs="*", choices=[[], *FAULTS], default=[])
    parser.add_argument("--communicator", action="append", choices=list(communicators()))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    asked = parser.parse_args()
    missing = [tool for tool in ("ip", "tc", "ss") if shutil.which(tool) is None]
    if os.getuid() != 0 or missing:
        print(
            "link_faults.py makes hosts of network namespaces, for which it needs to be root and "
            "to have iproute2 (apt-get install iproute2)",
            file=sys.stderr,
        )
        return 2
    # Ended by a signal, it still ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    print(f"seed {asked.seed}", flush=True)
    rows: list[tuple[str, str, Outcome]] = []
    with tempfile.TemporaryDirectory(prefix="dtk-links-") as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT.replace("EPOCHS", str(EPOCHS)))
        whole: np.ndarray | None = None
        for communicator in asked.communicator or communicators():
            for fault in [None, *(asked.fault or FAULTS)]:
                place = Path(folder, f"{communicator}-{fault}")
                chance = random.Random(f"{asked.seed} {communicator} {fault}")
                found = trial(communicator, fault, chance, script, place, whole)
                if whole is None:
                    if found.wrong:
                        print("the training that nothing happens to fails")
                        return 1
                    whole = np.load(place / "weights.npy")
                rows.append((communicator, fault or "none", found))
                print(line(*rows[-1]), flush=True)
    print("\ncommunicator  fault      end s  gone s  what happened")
    for row in rows:
        print(line(*row))
    wrong = sum(bool(found.wrong) for _, _, found in rows)
    print("nothing was wrong" if not wrong else f"{wrong} of these were wrong")
    return int(wrong > 0)


def line(communicator: str, fault: str, found: Outcome) -> str:
    """Return a row of the table."""
    wrong = "".join(f"; WRONG: {one}" for one in found.wrong)
    times = f"{found.end:6.1f} {found.gone:7.1f}"
    return f"{communicator:13} {fault:9} {times}  {found.what}{wrong}"


def communicators() -> dict[str, bool]:
    """Return those that this machine has, as keys."""
    mpi = mpi_installs.mpirun() is not None
    horovod = importlib.util.find_spec("horovod") is not None
    there = {"collective": True, "horovod": horovod, "mpi": mpi}
    return {name: True for name, is_there in there.items() if is_there}


def trial(
    communicator: str,
    fault: str | None,
    chance: random.Random,
    script: Path,
    folder: Path,
    whole: np.ndarray | None,
) -> Outcome:
    """Start a job on two new hosts, strike their link, and see what comes of it."""
    folder.mkdir()
    with hosts.hosts(2) as (addresses, shell):
        link = Link(addresses, shell)
        with tcp_shell.served(shell, addresses[0]), tcp_shell.served(shell, addresses[1]) as remote:
            words = ["exec", "env", "DTK_CALIBRATE=0", str(BIN / "python"), "-m", "dtk.cli.main"]
            words += ["run", "--hosts", ",".join(f"{address}:1" for address in addresses)]
            words += ["--remote-shell", remote, "--communicator", communicator]
            words += ["--stall-timeout", f"{STALL:g}", str(script), str(folder)]
            before = link.pids()
            with (
                (folder / "told").open("w") as told,
                subprocess.Popen(
                    [remote, addresses[0], " ".join(words)],
                    stdin=subprocess.DEVNULL,
                    stdout=told,
                    stderr=told,
                ) as job,
            ):
                try:
                    return watched(job, link, before, fault, chance, folder, whole)
                finally:
                    job.kill()


def watched(
    job: subprocess.Popen[bytes],
    link: Link,
    before: set[int],
    fault: str | None,
    chance: random.Random,
    folder: Path,
    whole: np.ndarray | None,
) -> Outcome:
    """Strike the link of a job once it trains, and see what comes of it."""
    wrong: list[str] = []
    marks = [folder / f"rank-{rank}" for rank in range(2)]
    deadline = time.monotonic() + START
    while not all(mark.exists() for mark in marks) and job.poll() is None:
        if time.monotonic() > deadline:
            return failed(folder, "does not start")
        time.sleep(0.05)
    time.sleep(chance.uniform(1.0, 4.0))
    struck = time.monotonic()
    if job.poll() is not None:
        return failed(folder, "ended before the fault")
    if fault is not None:
        FAULTS[fault](link)
    # A job that goes on is found out to after `END`.
    goes_on = False
    try:
        job.wait(max(0.0, struck + END - time.monotonic()))
    except subprocess.TimeoutExpired:
        last = newest(marks)
        time.sleep(5.0)
        goes_on = newest(marks) > last
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(WHOLE if goes_on else 0.1)
    end = time.monotonic() - struck
    if job.poll() is None:
        wrong.append("goes on for ever" if goes_on else "hang")
    while (left := link.pids() - before) and time.monotonic() < struck + max(end + 10.0, GONE):
        time.sleep(0.2)
    gone = time.monotonic() - struck
    wrong += [f"left running: {command(pid)}" for pid in sorted(left)]
    code = job.poll()
    text = (folder / "told").read_text()
    if code == 0:
        what = "trained on"
        found = np.load(folder / "weights.npy")
        if whole is not None and not np.array_equal(found, whole):
            wrong.append(f"weights differ by {np.abs(found - whole).max():g}")
        elif whole is not None:
            what += ", equal weights"
    else:
        named = NAMED.search(text)
        what = f"exit code {code}: {named[0].strip() if named else ''}"
        if named is None:
            wrong.append("no rank with its host")
        elif fault in ("cut", "shell") and f"rank 1, host {link.addresses[1]}" not in named[0]:
            wrong.append("wrong rank")
        if fault in (None, "slow"):
            wrong.append("ended")
    if wrong:
        print(f"--- {fault}, {', '.join(wrong)}\n{text}", flush=True)
    return Outcome(what, end, gone, tuple(wrong))


def failed(folder: Path, why: str) -> Outcome:
    """Return what came of a job that no fault could strike, and print what it said."""
    print(f"--- {why}\n{(folder / 'told').read_text()}", flush=True)
    return Outcome("", 0.0, 0.0, (why,))


def newest(marks: list[Path]) -> float:
    """Return when a rank has last trained a batch."""
    return max(mark.stat().st_mtime for mark in marks)


def command(pid: int) -> str:
    """Return the command of a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:100]
    return "one that has just ended"


def output(*words: str) -> str:
    """Run a command, and return what it prints."""
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout


if __name__ == "__main__":
    sys.exit(main())
