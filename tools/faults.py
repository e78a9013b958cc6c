"""Kill and stop ranks at random moments, and say whether jobs survive it.

    python tools/faults.py                          # kills, also while saving, stalls, servers
    python tools/faults.py kills --count 20 --seed 7 --busy 4
    python tools/faults.py stalls --phase save --way MPI

Each trial starts a job that resumes the training of the trial before, waits until all ranks train,
and ends one of them. Looked at are: whether the job ends in time, which rank its report names,
whether a process of it is left, and, once the last trial of a way to start jobs is over, whether
the training that was interrupted so often ends with the weights of one that never was. Ranks that
are stopped, sleep or lack data are in `stall_faults.py`, servers below. The exit code is 1 if
anything was otherwise.

`--busy` keeps so many processes computing beside the job, which delays whoever notices the end of
a rank. Every random choice follows from the seed, which is printed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import stall_faults
from fault_jobs import BIN, END, RANKS, START, Way, awaited, marked, started, task, ways

COUNTS = {"kills": 100, "saves": 100, "stalls": 30, "servers": 20}
SERVED = Path(__file__).resolve().parents[1] / "examples" / "digits_parameter_server.py"
SCRIPT = """
import os, pathlib, sys, time
import dtk, keras, numpy as np
folder, freq, pause = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
strategy = dtk.auto_strategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    layers = [keras.layers.Dense(16, activation="relu", name="a"), keras.layers.Dense(1, name="b")]
    model = keras.Sequential([keras.Input((20,)), *layers])
    model.compile("adam", "mse")
class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if pause:
            (folder / f"rank-{strategy.rank}").write_text(f"{os.getpid()} ")
            time.sleep(pause)
x = np.random.default_rng(0).normal(size=(256, 20)).astype("float32")
saves = dtk.callbacks.Checkpoint(folder / "checkpoints", save_freq=freq)
model.fit(x, x[:, :1] ** 2, epochs=EPOCHS, batch_size=16, verbose=0, callbacks=[saves, Tell()])
if strategy.rank == 0:
    np.save(folder / "weights.npy", np.concatenate([w.ravel() for w in model.get_weights()]))
"""
EPOCHS = 60


class Outcome(NamedTuple):
    """How one trial ended.

    Attributes:
        finished: Whether the training was over before the fault came.
        faults: What was wrong: "hang", "wrong rank", "left running" ...
        told: What the job wrote to its standard error.
    """

    finished: bool
    faults: tuple[str, ...]
    told: str = ""


def main() -> int:
    """Run the trials asked for, and print a table."""
    parser = argparse.ArgumentParser(description="Kill and stop ranks at random moments.")
    parser.add_argument("kind", nargs="*", choices=[[], *COUNTS], default=[])
    parser.add_argument("--count", type=int, help=f"trials of each kind; {COUNTS} without")
    phases = stall_faults.PHASES
    parser.add_argument("--phase", action="append", choices=phases, help="of stalls; all without")
    parser.add_argument("--way", action="append", default=[], help="words of ways to start jobs")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--busy", type=int, default=4, help="processes that compute beside")
    asked = parser.parse_args()
    # Ended by a signal, it still ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    print(f"seed {asked.seed}, {asked.busy} busy processes beside", flush=True)
    kinds = asked.kind or list(COUNTS)
    wrong = 0
    with busy(asked.busy), tempfile.TemporaryDirectory(prefix="dtk-faults-") as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT.replace("EPOCHS", str(EPOCHS)))
        compared = {"kills", "saves"} & set(kinds)
        whole = np.asarray(reference(script, Path(folder, "whole")) if compared else [])
        for kind in kinds:
            count = asked.count or COUNTS[kind]
            if kind == "servers":
                wrong += servers(count, random.Random(f"{asked.seed} servers"))
                continue
            if kind == "stalls":
                chosen = tuple(asked.phase or phases)
                wrong += stall_faults.run(count, asked.way, asked.seed, chosen)
                continue
            every = [way for way in ways() if all(word in way.name for word in asked.way)]
            for index, way in enumerate(every):
                share = count // len(every) + (index < count % len(every))
                chance = random.Random(f"{asked.seed} {kind} {way.name}")
                place = Path(folder, kind, str(index))
                wrong += campaign(kind, way, share, chance, script, place, whole)
    print("nothing was wrong" if not wrong else f"{wrong} of these were wrong")
    return int(wrong > 0)


def campaign(
    kind: str,
    way: Way,
    count: int,
    chance: random.Random,
    script: Path,
    folder: Path,
    whole: np.ndarray,
) -> int:
    """Interrupt one way of starting jobs again and again; returns how often something was wrong."""
    seen: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    folder.mkdir(parents=True)
    chains = 0
    for _ in range(count):
        outcome = trial(kind, way, chance, script, folder)
        if outcome.finished:
            seen["differs"] += differs(folder, whole)
            chains += 1
            shutil.rmtree(folder)
            folder.mkdir()
        seen.update(outcome.faults)
        for fault in outcome.faults:
            print(f"--- {kind}, {way.name}: {fault}\n{outcome.told}", flush=True)
    if not finish(way, script, folder):
        seen["does not resume"] += 1
    elif differs(folder, whole):
        seen["differs"] += 1
    faults = ", ".join(f"{fault}: {times}" for fault, times in seen.items() if times) or "all well"
    minutes = (time.monotonic() - began) / 60
    print(f"{kind:7} {way.name:22} {count:4} trials, {minutes:5.1f} min, {faults}", flush=True)
    return sum(seen.values())


def servers(count: int, chance: random.Random) -> int:
    """Strike tasks of jobs with a parameter server; returns how often something was wrong.

    A worker is started again, and the training ends; without its server or its chief it ends with
    their name.
    """
    began, wrong = time.monotonic(), 0
    command = [str(BIN / "dtk"), "run", "-n", "2", "--ps", "1", str(SERVED), "--epochs=2"]
    for trial in range(count):
        mark = f"{os.getpid()}-servers-{trial}"
        role, index = chance.choice([("worker", 0), ("worker", 1), ("ps", 0), ("chief", 0)])
        with tempfile.TemporaryFile("w+") as told, started(command, mark, told, told) as job:
            time.sleep(chance.uniform(1.0, 15.0))
            found = [process for process in marked(mark) if task(process) == (role, index)]
            for process in found[:1]:
                process.kill()
            faults, text = awaited(job, mark, told, 4 * END)
        survives = role == "worker" or not found
        name = "ps 0" if role == "ps" else "rank 0"
        if survives and job.returncode:
            faults.append("a worker was not replaced")
        # Killed after its last step, the chief may have succeeded.
        if job.returncode and not survives and f"{name}, host localhost, failed first" not in text:
            faults.append("wrong rank")
        for fault in faults:
            print(f"--- servers: {fault}, struck was {role} {index}\n{text}", flush=True)
        wrong += len(faults)
    minutes = (time.monotonic() - began) / 60
    print(f"servers dtk run --ps 1         {count:4} trials, {minutes:5.1f} min, {wrong} wrong")
    return wrong


def trial(kind: str, way: Way, chance: random.Random, script: Path, folder: Path) -> Outcome:
    """Start a job, strike one of its ranks, and see how it ends."""
    for old in folder.glob("rank-*"):
        old.unlink()
    frequency = "1" if kind == "saves" else "7"
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    victim = 0 if kind == "saves" else chance.randrange(RANKS)
    with (
        tempfile.TemporaryFile("w+") as told,
        started([*way.command, str(script), str(folder), frequency, "0.02"], mark, told) as job,
    ):
        pids = wait_for_ranks(job, folder)
        if pids is None:
            job.wait(END)
            told.seek(0)
            text = told.read()
            return Outcome(job.returncode == 0, () if job.returncode == 0 else ("no start",), text)
        if kind == "saves":
            wait_for_save(folder / "checkpoints", chance.randrange(1, 30))
        else:
            time.sleep(chance.uniform(0.0, 1.5))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[victim], chance.choice(SIGNALS))
        faults, text = awaited(job, mark, told, END)
    if job.returncode == 0:
        return Outcome(not faults, tuple(faults), text)
    named = re.search(way.named, text)
    if named is None or int(named[1]) != victim:
        faults.append("wrong rank" if named else "no rank")
    return Outcome(False, tuple(faults), f"struck was rank {victim}\n{text}")


SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)


def wait_for_ranks(job: subprocess.Popen[str], folder: Path) -> list[int] | None:
    """Wait until every rank has trained a batch; returns their ids, None if the job ended first."""
    deadline = time.monotonic() + START
    files = [folder / f"rank-{rank}" for rank in range(RANKS)]
    while time.monotonic() < deadline and job.poll() is None:
        words = [file.read_text() for file in files if file.exists()]
        if len(words) == RANKS and all(word.endswith(" ") for word in words):
            return [int(word) for word in words]
        time.sleep(0.02)
    return None


def wait_for_save(folder: Path, changes: int) -> None:
    """Wait until a directory has changed so often: most changes are those of a save under way."""
    deadline = time.monotonic() + 20.0
    before: set[str] = set()
    while changes > 0 and time.monotonic() < deadline:
        now = {f"{root}/{name}" for root, _, names in os.walk(folder) for name in names}
        changes -= now != before
        before = now


def finish(way: Way, script: Path, folder: Path) -> bool:
    """Let an interrupted training come to its end; returns whether it did."""
    command = [*way.command, str(script), str(folder), "1000", "0"]
    with (
        tempfile.TemporaryFile("w+") as told,
        started(command, f"{os.getpid()}-finish", told) as job,
    ):
        if job.wait(300) == 0:
            return True
        told.seek(0)
        print(told.read(), flush=True)
    return False


def reference(script: Path, folder: Path) -> np.ndarray:
    """Return the weights of a training that is not interrupted."""
    folder.mkdir()
    if not finish(ways()[0], script, folder):
        raise SystemExit("the training without faults does not end with 0")
    return np.load(folder / "weights.npy")


def differs(folder: Path, whole: np.ndarray) -> bool:
    """Return whether a training has ended with other weights, and say by how much."""
    found = np.load(folder / "weights.npy")
    if np.array_equal(found, whole):
        return False
    print(f"weights differ by {np.abs(found - whole).max():g}", flush=True)
    return True


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep processes computing meanwhile."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
