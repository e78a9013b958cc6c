"""Lose a host while two train, and get it back: `dtk run --min-workers` with real hosts.

    python tools/lost_host.py --communicator collective --seed 7

Two network namespaces are the hosts, as in `link_faults.py`. The cable of the second is pulled: the
job must go on with the first alone, from the last checkpoint. The cable is put back and the rank
that trains is killed: the job must go on with both. It must end with the weights of a training that
nothing happened to, within 1e-5 of them, as one worker and two add up in another order.

The exit code is 1 if it does not, 2 where hosts cannot be made.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import link_faults as links
import numpy as np
import psutil

SECONDS = 150.0  # until a job has started again: a stall, a silent host, and TensorFlow's import
SCRIPT = links.SCRIPT.replace(
    "model.fit(",
    "saves = dtk.callbacks.Checkpoint(folder / 'checkpoints', save_freq='epoch')\nmodel.fit(",
).replace("callbacks=[Tell()]", "callbacks=[saves, Tell()]")
SCRIPT = SCRIPT.replace(
    'f"rank-{strategy.rank}").touch()',
    'f"rank-{strategy.rank}").write_text(f"{strategy.world.size}")',
)


def main() -> int:
    """Lose a host and get it back; say what became of the job."""
    parser = argparse.ArgumentParser(description="Lose a host while two train, and get it back.")
    parser.add_argument("--communicator", choices=list(links.communicators()), default="collective")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    asked = parser.parse_args()
    if os.getuid() != 0 or shutil.which("ip") is None:
        print("lost_host.py needs root and iproute2 (apt-get install iproute2)", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    print(f"seed {asked.seed}", flush=True)
    chance = random.Random(asked.seed)
    with tempfile.TemporaryDirectory(prefix="dtk-lost-") as made:
        folder = Path(made)
        (folder / "train.py").write_text(SCRIPT.replace("EPOCHS", str(links.EPOCHS)))
        whole, told = folder / "whole", folder / "struck"
        for place in (whole, told):
            place.mkdir()
        alone = [sys.executable, str(folder / "train.py"), str(whole)]
        subprocess.run(alone, check=True, capture_output=True)
        with links.hosts.hosts(2) as (addresses, shell):
            link = links.Link(addresses, shell)
            try:
                struck(link, asked.communicator, folder / "train.py", told, chance)
            except TimeoutError as error:
                print(f"{error}\n{(told / 'said').read_text()[-3000:]}")
                return 1
        difference = np.abs(np.load(told / "weights.npy") - np.load(whole / "weights.npy")).max()
    print(f"weights differ by {difference:.1g} at most")
    return int(not difference < 1e-5)


def struck(
    link: links.Link, communicator: str, script: Path, folder: Path, chance: random.Random
) -> None:
    """Train on both hosts, on one, and on both again, to the end."""
    hosts = ",".join(f"{address}:1" for address in link.addresses)
    with (
        links.tcp_shell.served(link.shell, link.addresses[0]),
        links.tcp_shell.served(link.shell, link.addresses[1]) as remote,
        (folder / "said").open("w") as said,
    ):
        words = ["exec", "env", "DTK_CALIBRATE=0", sys.executable, "-m", "dtk.cli.main", "run"]
        words += ["--hosts", hosts, "--remote-shell", remote, "--communicator", communicator]
        words += ["--stall-timeout", f"{links.STALL:g}", "--min-workers", "1"]
        words += ["--max-restarts", "6", str(script), str(folder)]
        command = [remote, link.addresses[0], " ".join(words)]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said) as job:
            try:
                began = time.monotonic()
                await_world(folder, 2)
                report(began, "trains with 2")
                time.sleep(chance.uniform(1.0, 4.0))
                link.down()
                report(began, "the second host is lost")
                await_world(folder, 1)
                report(began, "trains with 1")
                time.sleep(chance.uniform(1.0, 3.0))
                link.up()
                kill_ranks(link, script)
                report(began, "the second host is back, and the rank is killed")
                await_world(folder, 2)
                report(began, "trains with 2")
                code = job.wait(links.WHOLE)
                report(began, f"ended with {code}")
                if code:
                    raise TimeoutError(f"exit code {code}")
            except subprocess.TimeoutExpired:
                raise TimeoutError("the job does not end") from None
            finally:
                job.kill()


def await_world(folder: Path, size: int) -> None:
    """Wait until rank 0 trains in a world of a size."""
    mark = folder / "rank-0"
    deadline = time.monotonic() + SECONDS
    while not mark.exists() or mark.read_text() != str(size):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no world of {size} after {SECONDS:g} s")
        time.sleep(0.1)


def kill_ranks(link: links.Link, script: Path) -> None:
    """Kill what runs the script itself on the hosts, which count their processes by themselves."""
    for pid in link.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.cmdline()[1:2] == [str(script)]:
                process.kill()


def report(began: float, what: str) -> None:
    """Say when something happened."""
    print(f"{time.monotonic() - began:6.1f} s: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
