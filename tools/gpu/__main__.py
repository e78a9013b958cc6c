"""What dtk does on this machine's GPUs, as one page: `python tools/gpu > gpu.md`.

    equality     tools/gpu/matrix.py on one process and on one for each GPU: the same weights
    all-reduce   a small and a large one
    models       the four of `dtk bench`

With one GPU, the matrix compares it with the CPU, and two ranks share it. Without a GPU it says so,
and `--cpus 2` shows what the page would hold. Takes some 15 minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

MATRIX = Path(__file__).with_name("matrix.py")
DTK = [sys.executable, "-m", "dtk"]

parser = argparse.ArgumentParser(prog="gpu", description="Measure dtk on the GPUs of this machine.")
parser.add_argument("--cpus", type=int, default=0, help="pretend: so many processes on the CPU")
parser.add_argument("--quick", action="store_true", help="one round of each measurement")


def main() -> None:
    """Print the page."""
    args = parser.parse_args()
    gpus = [] if args.cpus else names_of_gpus()
    if not gpus and not args.cpus:
        sys.exit("nvidia-smi names no GPU here. Next: run it where there is one, or give --cpus 2")
    count = len(gpus) or args.cpus
    rounds = ["--rounds", "1"] if args.quick else []
    print(f"# dtk on {', '.join(gpus) or f'{args.cpus} processes of the CPU'}\n")
    show("What is here", [*DTK, "doctor"])
    print(f"## Equality\n\n{equality(count, bool(gpus))}\n", flush=True)
    many = ["-n", str(count), "--communicator", "collective", *rounds]
    if count > 1:
        show("All-reduce", [*DTK, "bench", *many, "--allreduce", "4kB", "--allreduce", "100MB"])
    show("Models", [*DTK, "bench", *many])


def names_of_gpus() -> list[str]:
    """Ask NVIDIA's driver for the GPUs of this machine."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return told.strip().splitlines()


def show(title: str, command: list[str]) -> None:
    """Print what a command prints, and with which code it fails."""
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    failed = f"\nexit code {ended.returncode}" if ended.returncode else ""
    shown = " ".join(["dtk", *command[len(DTK) :]])
    print(f"## {title}\n\n```text\n$ {shown}\n{ended.stdout.strip()}{failed}\n```\n", flush=True)


def equality(count: int, on_gpus: bool) -> str:
    """Return a table of how far weights are from those of one process, or of the CPU."""
    one_gpu = on_gpus and count == 1
    here, run = [sys.executable, str(MATRIX)], [*DTK, "run", "--communicator", "collective"]
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"} if one_gpu else {}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{number}.npz") for number in range(4 if one_gpu else 3)]
        train([*here, str(files[0])], hidden)
        train([*run, "-n", str(count), str(MATRIX), str(files[1])], {})
        train([*here, str(files[2]), str(count)], {})
        if one_gpu:
            train([*run, "-n", "2", str(MATRIX), str(files[3]), "one-card"], {})
        alone, *others = [dict(np.load(file)) for file in files]
    names = [f"{count} ranks", f"{count} replicas", "2 ranks on the card"][: len(others)]
    against = "the CPU" if one_gpu else "one process"
    head = f"| weights, against {against} | {' | '.join(names)} |"
    rows = [row(name, alone, others) for name in alone]
    return "\n".join([head, "|---" * (len(names) + 1) + "|", *rows])


def row(name: str, alone: dict[str, np.ndarray], others: list[dict[str, np.ndarray]]) -> str:
    """Return a row of the table: relative distances."""
    size = np.linalg.norm(alone[name])
    told = [f"{np.linalg.norm(other[name] - alone[name]) / size:.1e}" for other in others]
    return f"| {' | '.join([name, *told])} |"


def train(command: list[str], more: dict[str, str]) -> None:
    """Run the matrix; what it prints goes to standard error."""
    subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, **more})


if __name__ == "__main__":
    main()
