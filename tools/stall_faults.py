"""Stop, silence or starve one rank in a phase of its work, and say whether the job notices.

Each trial draws a phase (fit, loop, evaluate, predict, save, start), a place in it and a fault:
SIGSTOP, a sleep, or data that ends earlier on one rank. Looked at are: whether the job ends within
its bound, which rank it names, whether the stack of that rank is there, and whether a process is
left.
Behind parameter servers a worker that is stuck must be replaced instead, and a rank that is only
slow must be waited for. `tests/launch/test_stall_phases.py` makes one trial of each kind.
"""

from __future__ import annotations

import collections
import json
import os
import random
import re
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from fault_jobs import BIN, END, RANKS, STALL, START, Way, awaited, started, ways

PHASES = ("fit", "loop", "evaluate", "predict", "save", "start")
FAULTS = ("stop", "sleep", "shorter", "slow")
SERVERS = "dtk run, servers"
# Where a fault comes: in fit also while data is read, in a save also in the thread that writes.
PLACES = {
    "fit": ("callback", "data"),
    "loop": ("step",),
    "evaluate": ("callback",),
    "predict": ("callback",),
    "save": ("state", "thread", "beside"),
    "start": ("import", "imported", "constructor", "build", "trace"),
}
NAMED = (
    r"rank (\d+), host \S+, (?:did nothing|reported nothing|got no data|has come to the end"
    r"|has left its script)"
)
SCRIPT = """
import json, os, pathlib, signal, sys, threading, time, traceback
asked = json.loads(sys.argv[1])
phase, fault, place, victim = (asked[one] for one in ("phase", "fault", "place", "victim"))
folder = pathlib.Path(asked["folder"])
task = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task")
if asked["served"]:
    me = f"{task['type']} {task['index']}"
else:
    known = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "HOROVOD_RANK", "RANK")
    me = next((os.environ[one] for one in known if one in os.environ), None) or str(task["index"])
(folder / f"pid {me}").write_text(str(os.getpid()))

def strike(where, inside=True):
    # The chief strikes tasks that only serve.
    far = asked["served"] and victim.startswith(("worker", "ps")) and phase != "start"
    mine = me.startswith("chief") if far else me == victim
    if (where, inside, mine) != (place, True, True) or (folder / "struck").exists():
        return
    if fault == "shorter":
        return
    (folder / "struck").touch()
    if far:
        os.kill(int((folder / f"pid {victim}").read_text()), signal.SIGSTOP)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)
    elif fault == "slow":
        over = time.time() + 2 * asked["stall"]
        while time.time() < over:
            sum(range(10_000))
    else:
        time.sleep(600)

strike("import")
import dtk
strike("imported")
import keras, numpy as np, tensorflow as tf
if place == "constructor":
    detect = dtk.cluster.detect
    def detected(*given):
        strike("constructor")
        return detect(*given)
    dtk.cluster.detect = detected
strategy = dtk.auto_strategy()

class Struck(keras.layers.Layer):
    def call(self, x):
        strike("build")
        strike("trace", any(frame.name == "run_step" for frame in traceback.extract_stack()))
        return x

class Strike(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        strike("beside", batch == asked["batch"])
    def on_train_batch_end(self, batch, logs=None):
        strike("callback", phase == "fit" and batch == asked["batch"])
    def on_test_batch_end(self, batch, logs=None):
        strike("callback", phase == "evaluate" and batch == asked["batch"])
    def on_predict_batch_end(self, batch, logs=None):
        strike("callback", phase == "predict" and batch == asked["batch"])
    def get_state(self):
        strike("state")
        return {}
    def set_state(self, state):
        pass

def rows(which):
    short = fault == "shorter" and me == victim and which == phase
    for index in range(40 - asked["batch"] * short):
        strike("data", which == phase and index == asked["batch"])
        yield np.ones((8, 4), "float32") * index, np.ones((8, 1), "float32")
    if short:
        (folder / "struck").touch()

rename = os.rename
def renamed(*given, **also):
    strike("thread", threading.current_thread().name.startswith("dtk"))
    return rename(*given, **also)
if place == "thread":
    os.rename = renamed

with strategy.scope():
    layers = [Struck()] if place in ("build", "trace") else []
    layers += [keras.layers.Dense(8), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", "mse")
callbacks = [Strike()]
if phase == "save":
    freq = 3 if fault != "shorter" else 1
    callbacks.append(dtk.callbacks.Checkpoint(
        folder / "saved", save_freq=freq, background=place == "thread" or asked["background"]))

def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

if phase == "loop":
    together = tf.function(lambda x, y: strategy.run(step, (x, y)))
    for batch, (x, y) in enumerate(rows("loop")):
        together(x, y)
        strike("step", batch == asked["batch"])
model.fit(rows("save" if phase == "save" else "fit"), verbose=0, callbacks=callbacks)
model.evaluate(rows("evaluate"), verbose=0, callbacks=[Strike()])
model.predict(((x,) for x, _ in rows("predict")), verbose=0, callbacks=[Strike()])
print("done", flush=True)
"""


class Trial(NamedTuple):
    """What is done to one rank.

    Attributes:
        phase: See `PHASES`.
        fault: See `FAULTS`.
        place: See `PLACES`.
        victim: The rank, or with parameter servers the task.
        batch: At which batch of an epoch, or how many the data lacks.
        background: Whether checkpoints are written in the background.
    """

    phase: str
    fault: str
    place: str
    victim: str
    batch: int
    background: bool


def drawn(chance: random.Random, served: bool, phases: tuple[str, ...]) -> Trial:
    """Draw a trial that makes sense.

    Args:
        chance: The source of randomness.
        served: Whether there are parameter servers.
        phases: Those to choose from.
    """
    phase, fault = chance.choice(phases), chance.choice(FAULTS)
    place = chance.choice(PLACES[phase])
    victim = str(chance.randrange(RANKS))
    if served:
        victim = chance.choice(("chief 0", "worker 0", "worker 1", "ps 0"))
        # Data is the chief's alone, and what serves runs nothing of the script but its beginning.
        fault = "sleep" if fault in ("shorter", "slow") else fault
        place = "build" if place == "trace" else place
        phase, place = ("fit", "callback") if phase == "loop" else (phase, place)
        if victim != "chief 0":
            fault = fault if phase == "start" else "stop"
            place = (
                chance.choice(("import", "imported", "constructor")) if phase == "start" else place
            )
    elif fault == "shorter" and phase in ("loop", "start"):
        fault = "sleep"
    elif phase == "save" and fault != "shorter":
        # Rank 0 saves.
        victim = "1" if place == "beside" else "0"
    if served and phase == "save" and victim == "chief 0" and place == "beside":
        place = "state"
    return Trial(phase, fault, place, victim, chance.randrange(1, 6), chance.random() < 0.5)


def every_way() -> list[Way]:
    """Return the ways to start a job, with and without parameter servers."""
    command = (str(BIN / "dtk"), "run", "-n", "2", "--ps", "1", "--stall-timeout", str(STALL))
    return [*ways(), Way(SERVERS, command, "")]


def run(count: int, words: list[str], seed: int, phases: tuple[str, ...]) -> int:
    """Run trials over all ways to start a job; return how often something was wrong.

    Args:
        count: Number of trials.
        words: All of which are in the names of the ways that are tried.
        seed: Every choice follows from it.
        phases: Those to choose from.
    """
    every = [way for way in every_way() if all(word in way.name for word in words)]
    wrong = 0
    for index, way in enumerate(every):
        chance = random.Random(f"{seed} stalls {way.name}")
        share = count // len(every) + (index < count % len(every))
        seen: dict[tuple[str, str], list[list[str]]] = collections.defaultdict(list)
        for _ in range(share):
            trial = drawn(chance, way.name == SERVERS, phases)
            faults, _ = struck(way, trial)
            seen[trial.phase, trial.fault].append(faults)
        for (phase, fault), found in sorted(seen.items()):
            told = collections.Counter(one for faults in found for one in faults)
            said = ", ".join(f"{what}: {times}" for what, times in told.items()) or "all well"
            print(
                f"stalls  {way.name:22} {phase:8} {fault:7} {len(found):3} trials, {said}",
                flush=True,
            )
            wrong += sum(told.values())
    return wrong


def struck(way: Way, trial: Trial) -> tuple[list[str], str]:
    """Run a trial; return what was wrong, which is printed too, and all that the job said."""
    served = way.name == SERVERS
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory(prefix="dtk-stall-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        asked = json.dumps({**trial._asdict(), "folder": name, "served": served, "stall": STALL})
        with (
            tempfile.TemporaryFile("w+") as told,
            started([*way.command, str(folder / "train.py"), asked], mark, told) as job,
        ):
            began = time.monotonic()
            deadline = began + START
            while not (folder / "struck").exists() and job.poll() is None:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            hit = (folder / "struck").exists()
            when = time.monotonic()
            survives = served and trial.victim.startswith("worker")
            goes_on = survives or trial.fault == "slow"
            faults, text = awaited(job, mark, told, 3 * END if goes_on else END)
            seconds = time.monotonic() - when
    if not hit:
        faults.append("not struck")
    elif survives:
        faults += _wrong_of_a_worker(job.returncode, text)
    elif trial.fault == "slow":
        faults += [f"ended with {job.returncode}"] if job.returncode else []
    else:
        faults += _wrong(way, trial, job.returncode, text)
    print(
        f"    {way.name:22} {trial.phase:8} {trial.fault:7} {trial.place:11} {trial.victim:8} "
        f"{seconds:5.1f} s {', '.join(faults) or 'well'}",
        flush=True,
    )
    if faults:
        print(f"--- {trial}, exit code {job.returncode}\n{text}", flush=True)
    return faults, text


def _wrong_of_a_worker(code: int, text: str) -> list[str]:
    found = ["a worker was not replaced"] if code else []
    return found if "and was ended; starting it again" in text else [*found, "not noticed"]


def _wrong(way: Way, trial: Trial, code: int, text: str) -> list[str]:
    found = [] if code else ["ended with 0"]
    victim = trial.victim.replace("chief 0", "0")
    pattern = NAMED if not victim.startswith("ps") else NAMED.replace(r"rank (\d+)", r"(ps 0)")
    named = re.findall(pattern, text)
    if set(named) != {victim}:
        found.append("wrong rank" if named else "no rank")
    # Only the launcher can make a process speak that is stopped, or has made no strategy yet.
    early = trial.phase == "start" and trial.place not in ("build", "trace")
    can_tell = way.name.startswith("dtk run") or not (early or trial.fault == "stop")
    if can_tell and not victim.startswith("ps") and named:
        mark = "Its stack" if trial.fault == "shorter" else " in strike"
        if mark not in text:
            found.append("no stack")
    return found
