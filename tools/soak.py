"""Train for a long time, kill a rank every two minutes, and say whether anything grows.

    python tools/soak.py                                        # 30 minutes, 3 workers
    python tools/soak.py --minutes 3 --every 40 --communicator mpi --seed 7

One `dtk run --max-restarts` starts all ranks again after each kill, and `Checkpoint` resumes. Every
two seconds memory (resident), descriptors and threads of each rank and of the launcher are read.
Then the same number of epochs is trained without an interruption, and must end with equal weights.
The exit code is 1 if anything grew, hung, was left running, failed by itself or differs.

What counts as growing is the median of the last quarter against that of the second one, by more
than `BOUNDS`, of samples taken while all ranks train: of the launcher over the whole time; of ranks
within each attempt, and without kills, after the first 20 s, in which TensorFlow traces and its
pools of memory fill. Every random choice follows from the seed, which is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import fault_jobs as jobs
import numpy as np
import psutil

WORKERS = 3
PERIOD = 2.0  # seconds from sample to sample
WARM_UP = 20.0
FEWEST = 8  # samples, in a quarter of which there are two
START = 150.0  # seconds until all ranks train: 60 of them are what `dtk run` may wait
EPOCH = 60.0  # seconds that one may take on a busy machine; less than the stall timeout
STALL = 90.0
END = 120.0  # seconds from the stop file to the end of the job
LEFT = 15.0  # seconds after all ranks train in which a process of the attempt before may end
SCRIPT = """
import os, pathlib, sys, time
import dtk, keras, numpy as np
folder, epochs, pause = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
strategy = dtk.auto_strategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    layers = [keras.layers.Dense(64, activation="relu", name="a"), keras.layers.Dense(1, name="b")]
    model = keras.Sequential([keras.Input((20,)), *layers])
    model.compile("adam", "mse")
class Tell(keras.callbacks.Callback):
    trains = False
    def on_train_batch_end(self, batch, logs=None):
        if not self.trains:
            (folder / f"rank-{strategy.rank}").write_text(f"{os.getpid()} ")
        self.trains = True
        time.sleep(pause)
    def on_epoch_end(self, epoch, logs=None):
        if strategy.rank == 0:
            (folder / "epoch").write_text(f"{epoch} ")
            # Ranks agree on it at the end of the epoch.
            self.model.stop_training = (folder / "stop").exists()
x = np.random.default_rng(0).normal(size=(1920, 20)).astype("float32")
saves = dtk.callbacks.Checkpoint(folder / "checkpoints", resume=True)
trained = model.fit(x, x[:, :1] ** 2, epochs=epochs, batch_size=48, verbose=0,
                    callbacks=[saves, Tell()])
if strategy.rank == 0:
    np.save(folder / "weights.npy", np.concatenate([w.ravel() for w in model.get_weights()]))
    (folder / "epochs").write_text(str(trained.epoch[-1] + 1))
"""


class Sample(NamedTuple):
    """What a process holds at one moment.

    Attributes:
        memory: Resident, in MiB.
        descriptors: How many are open.
        threads: How many run.
        children: How many processes it has started and not waited for.
    """

    memory: float
    descriptors: float
    threads: float
    children: float


# What the last quarter may be above the second: memory by what an allocator keeps for itself, 3 %
# and 10 MiB; descriptors and children by one, as of a connection that is opened late; threads by
# those that gRPC's pools start and end again (a rank has 114 to 119, over half an hour). What grows
# by one a step, an epoch or a restart passes that within the time.
BOUNDS: dict[str, Callable[[float], float]] = {
    "memory": lambda before: 10.0 + 0.03 * before,
    "descriptors": lambda before: 1.0,
    "threads": lambda before: 5.0,
    "children": lambda before: 1.0,
}


class Attempt:
    """Samples of the ranks from one start of the job to the next.

    Args:
        job: The mark of its processes.
    """

    def __init__(self, job: str) -> None:
        self.job = job
        self.began = 0.0  # when all ranks trained; 0 before that
        self.samples: dict[int, list[Sample]] = {rank: [] for rank in range(WORKERS)}


class Soak:
    """One job, its kills, and what was seen of it.

    Args:
        folder: Of the training.
        launcher: The process of `dtk run`.
        mark: Of all processes.
        chance: Decides who is killed.
        keep: Gets every sample as a line of JSON, or None.
    """

    def __init__(
        self,
        folder: Path,
        launcher: subprocess.Popen[str],
        mark: str,
        chance: random.Random,
        keep: Path | None,
    ) -> None:
        self.attempts: list[Attempt] = []
        self.launcher: list[Sample] = []
        self.faults: list[str] = []
        self.kills = 0
        self._folder, self._process, self._mark, self._chance = folder, launcher, mark, chance
        self._keep = keep
        self._root = psutil.Process(launcher.pid)
        self._began = time.monotonic()
        self._moved = self._began  # when an attempt or an epoch last began or ended
        self._seen: tuple[str, str] = ("", "")

    def run(self, seconds: float, every: float) -> None:
        """Let it train so long, and kill a rank so often."""
        due = every
        while (now := time.monotonic() - self._began) < seconds and not self.faults:
            ranks = self.look()
            if self._process.poll() is not None:
                self.faults.append("ended before it was asked to")
            if now >= due and len(ranks) == WORKERS and now < seconds - every / 2:
                rank = self._chance.randrange(WORKERS)
                with contextlib.suppress(psutil.Error):
                    ranks[rank].kill()
                self.kills += 1
                print(f"{now:6.0f} s: killed rank {rank}, attempt {len(self.attempts)}", flush=True)
                due += every
            time.sleep(PERIOD)
        (self._folder / "stop").touch()
        deadline = time.monotonic() + START + END
        while self._process.poll() is None and time.monotonic() < deadline and not self.faults:
            self.look()
            time.sleep(PERIOD)
        if self._process.poll() is None:
            self.faults += [] if self.faults else ["hung: it does not end"]
        elif self._process.returncode:
            self.faults.append(f"ended with exit code {self._process.returncode}")
        if len(self.attempts) > self.kills + 1:
            self.faults.append(f"failed by itself: {len(self.attempts)} starts, {self.kills} kills")

    def look(self) -> dict[int, psutil.Process]:
        """Take samples; returns the ranks, if all of them train."""
        if self._process.poll() is not None:
            return {}
        ranks, marks = {}, set()
        with contextlib.suppress(psutil.Error):
            for child in self._root.children():
                with contextlib.suppress(psutil.Error):
                    job, _, name = child.environ().get("DTK_JOB", "").rpartition("/rank-")
                    if job:
                        ranks[int(name)] = child
                        marks.add(job)
        if len(marks) == 1 and (not self.attempts or {self.attempts[-1].job} != marks):
            self.attempts.append(Attempt(marks.pop()))
        self._check_progress()
        if not self.attempts or not all(
            rank in ranks and self._trains(rank, ranks[rank].pid) for rank in range(WORKERS)
        ):
            return {}
        attempt, now = self.attempts[-1], time.monotonic()
        attempt.began = attempt.began or now
        found = {rank: sample(process) for rank, process in ranks.items()}
        own = sample(self._root)
        if own is None or None in found.values():
            return {}  # one has just ended
        self.launcher.append(own)
        for rank, one in found.items():
            if one is not None and now > attempt.began + WARM_UP:
                attempt.samples[rank].append(one)
        if now > attempt.began + LEFT:
            self._check_orphans(attempt.job)
        self._write(now, own, found)
        return ranks

    def _trains(self, rank: int, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return (self._folder / f"rank-{rank}").read_text() == f"{pid} "
        return False

    def _check_progress(self) -> None:
        """Note when nothing has moved for longer than anything takes."""
        job, epoch = self.attempts[-1].job if self.attempts else "", ""
        with contextlib.suppress(OSError):
            epoch = (self._folder / "epoch").read_text()
        if (job, epoch) != self._seen:
            self._seen, self._moved = (job, epoch), time.monotonic()
        if time.monotonic() - self._moved > START + EPOCH + STALL:
            self.faults.append(f"hung: attempt {len(self.attempts)} after epoch {epoch}")

    def _check_orphans(self, job: str) -> None:
        """Note processes of earlier attempts that still run."""
        for process in jobs.marked(self._mark):
            with contextlib.suppress(psutil.Error):
                its = process.environ().get("DTK_JOB", job).partition("/")[0]
                if not its.startswith(job):
                    self.faults.append(f"left running: {process.pid} {process.cmdline()}")

    def _write(self, now: float, own: Sample, ranks: dict[int, Sample | None]) -> None:
        if self._keep is not None:
            told = {"seconds": round(now - self._began, 1), "attempt": len(self.attempts)}
            line = {**told, "launcher": own, "ranks": [ranks[rank] for rank in range(WORKERS)]}
            with self._keep.open("a") as file:
                file.write(json.dumps(line) + "\n")


def sample(process: psutil.Process) -> Sample | None:
    """Look at a process; None if it has ended."""
    with contextlib.suppress(psutil.Error):
        with process.oneshot():
            memory = process.memory_info().rss / 2**20
            threads = process.num_threads()
        return Sample(memory, process.num_fds(), threads, len(process.children()))
    return None


def report(name: str, samples: Sequence[Sample]) -> list[str]:
    """Print a row for each resource of one process; returns which of them grew."""
    if len(samples) < FEWEST:
        print(f"{name:20} {len(samples):7} too few", flush=True)
        return []
    grown = []
    cells = []
    for index, (resource, bound) in enumerate(BOUNDS.items()):
        values = [one[index] for one in samples]
        quarter = max(1, len(values) // 4)
        before = statistics.median(values[quarter : 2 * quarter])
        after = statistics.median(values[-quarter:])
        cells.append(
            f"{values[0]:7.0f} {values[-1]:5.0f} {max(values):5.0f} {after - before:+6.1f}"
        )
        if after - before > bound(before):
            grown.append(f"{name}: {resource} grew from {before:.1f} to {after:.1f}")
    print(f"{name:20} {len(samples):7} " + "".join(cells), flush=True)
    return grown


def report_ranks(name: str, attempt: Attempt) -> list[str]:
    """Print rows for all ranks of an attempt; returns what grew."""
    rows = attempt.samples.items()
    return [one for rank, samples in rows for one in report(f"{name}, rank {rank}", samples)]


def main() -> int:
    """Soak, compare, and print a table."""
    parser = argparse.ArgumentParser(description="Train long, kill ranks, and see what grows.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=120.0, help="seconds from kill to kill")
    parser.add_argument("--communicator", default="collective")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds after each batch")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--samples", type=Path, help="file that gets every sample")
    asked = parser.parse_args()
    # Ended by a signal, it still ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    print(f"seed {asked.seed}, {asked.communicator}, {asked.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="dtk-soak-") as place:
        wrong = soak(asked, Path(place))
    print(
        *wrong, "nothing was wrong" if not wrong else f"{len(wrong)} of these were wrong", sep="\n"
    )
    return int(bool(wrong))


def soak(asked: argparse.Namespace, place: Path) -> list[str]:
    """Do all of it; returns what was wrong."""
    script, folder, whole = place / "train.py", place / "killed", place / "whole"
    script.write_text(SCRIPT)
    folder.mkdir()
    whole.mkdir()
    mark = f"soak-{time.monotonic_ns()}"
    kills = int(asked.minutes * 60 / asked.every) + 3
    run = [str(jobs.BIN / "python"), "-m", "dtk.cli.main", "run", "-n", str(WORKERS)]
    run += ["--communicator", asked.communicator, "--stall-timeout", f"{STALL:g}"]
    often = ["--max-restarts", str(kills), str(script), str(folder), str(10**9), str(asked.pause)]
    with (
        open(place / "told", "w+") as told,
        jobs.started([*run, *often], mark, told) as job,
    ):
        found = Soak(folder, job, mark, random.Random(asked.seed), asked.samples)
        found.run(asked.minutes * 60, asked.every)
        if found.faults:
            jobs.end(mark)
        if not jobs.gone(mark):
            found.faults.append("left running after its end")
        told.seek(0)
        text = told.read()
    wrong = found.faults
    if wrong:
        print(f"--- the end of what it said\n{text[-8000:]}")
    titles = "".join(f"{resource:>26}" for resource in BOUNDS)
    print(f"{found.kills} kills, {len(found.attempts)} starts\n{'':28}{titles}")
    print(f"{'':20} samples " + "  start   end  most  grown" * len(BOUNDS))
    wrong += report("launcher", found.launcher)
    for number, attempt in enumerate(found.attempts, 1):
        wrong += report_ranks(f"attempt {number}", attempt)
    if not (folder / "epochs").exists():
        return wrong
    epochs = (folder / "epochs").read_text()
    began = time.monotonic()
    with (
        open(place / "told", "w+") as told,
        jobs.started([*run, str(script), str(whole), epochs, "0"], f"{mark}-whole", told) as job,
    ):
        calm = Soak(whole, job, f"{mark}-whole", random.Random(asked.seed), None)
        while job.poll() is None and not calm.faults:
            calm.look()
            time.sleep(PERIOD)
        if calm.faults or job.returncode:
            told.seek(0)
            print(f"--- the end of what it said\n{told.read()[-8000:]}")
            return [*wrong, f"the training without kills fails: {calm.faults or job.returncode}"]
    for attempt in calm.attempts:
        wrong += report_ranks("no kills", attempt)
    ended, wanted = np.load(folder / "weights.npy"), np.load(whole / "weights.npy")
    equal = np.array_equal(ended, wanted)
    seconds = time.monotonic() - began
    print(f"{epochs} epochs without kills took {seconds:.0f} s; weights equal: {equal}", flush=True)
    if not equal:
        wrong.append(f"weights differ by {np.abs(ended - wanted).max():g}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
