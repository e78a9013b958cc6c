"""Where the time goes from starting a job to its first step, and from its last to the prompt.

    python benchmarks/startup.py                             # 2 processes
    python benchmarks/startup.py -n 1 --rounds 15
    python benchmarks/startup.py --other ../dtk-before       # against another checkout of dtk

The same script is started in turns, so that whatever else the machine does falls on all alike:

    plain     N processes of plain Keras, started at once, each training by itself
    bare      N processes with dtk, started at once with the variables `dtk run` would give them
    dtk run   N processes with dtk, started by `dtk run`

`dtk run` - `bare` is what the launcher costs, `bare` - `plain` what dtk costs inside the ranks. A
phase is the mean over the processes, so that the phases of a turn add up to its whole. The kernel
notes the start of a process to 0.01 s, so the first two may err by that.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(description="Seconds from the start of a job to its first step.")
parser.add_argument("-n", "--workers", type=int, default=2)
parser.add_argument("--rounds", type=int, default=7, help="turns, after one that is not counted")
parser.add_argument("--layers", type=int, default=4, help="of the model: what is to be traced")
parser.add_argument("--contenders", nargs="+", help="some of them, by name")
parser.add_argument("--other", type=Path, metavar="DIR", help="another checkout of dtk to measure")
parser.add_argument("--samples", type=Path, metavar="FILE", help="add to those of earlier calls")
args = parser.parse_args()

# What has happened, in this order -> what the time until then went into.
PHASES = {
    "process": "processes started",
    "python": "Python started",
    "keras": "import tensorflow, keras",
    "strategy": "import dtk, strategy made",
    "model": "model built, compiled",
    "fit": "fit, until its first step",
    "step": "first step traced, run",
    "trained": "fit, after its first step",
    "end": "exit",
}
WHOLE = {"until the first step is over": "step", "until all is over": "end"}
NOT_USUAL = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")


def now():
    """Seconds on a clock that all processes share, and the kernel notes their start on."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def own_start():
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def train(distributed):
    """On every rank: one step, and the moments at which each phase was over."""
    seen = {"process": own_start(), "python": now()}
    if distributed:
        import dtk  # before TensorFlow, as README.md says
    import keras

    seen["keras"] = now()
    strategy = dtk.strategies.AllReduceStrategy() if distributed else None
    seen["strategy"] = now()
    with strategy.scope() if distributed else contextlib.nullcontext():
        layers = [keras.layers.Dense(64, activation="relu") for _ in range(args.layers - 1)]
        norm = keras.layers.BatchNormalization()
        model = keras.Sequential([keras.Input((64,)), *layers, norm, keras.layers.Dense(10)])
        model.compile("adam", keras.losses.MeanSquaredError(), metrics=["mae"])
    seen["model"] = now()

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen["fit"] = now()

        def on_train_batch_end(self, batch, logs=None):
            seen["step"] = now()

    x, y = (keras.random.normal((64, size), seed=1).numpy() for size in (64, 10))
    model.fit(x, y, batch_size=64, verbose=0, callbacks=[Watch()])
    seen["trained"] = now()
    print("RESULT", json.dumps(seen), flush=True)


def bare(env, distributed):
    """Start the processes without a launcher; returns what they printed."""
    from dtk.launch import assign

    processes = [
        subprocess.Popen(
            process.argv,
            env={**env, **process.env, "DTK_BENCHMARK_RANK": str(int(distributed))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in assign([sys.executable, __file__, *sys.argv[1:]], args.workers)
    ]
    printed = [process.communicate(timeout=120) for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a process failed:\n" + "".join(errors for _, errors in printed))
    return "".join(output for output, _ in printed)


def launched(env):
    """Start the processes with `dtk run`; returns what they printed."""
    command = [sys.executable, "-m", "dtk.cli.main", "run", "-n", str(args.workers)]
    env = {**env, "DTK_BENCHMARK_RANK": "1"}
    return subprocess.run(
        [*command, __file__, *sys.argv[1:]],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
        cwd=env.get("PYTHONPATH", "").partition(os.pathsep)[0] or None,  # `-m` looks there first
    ).stdout


def contenders():
    """Name -> what starts it."""
    # Byte code is kept, as it is for any user.
    usual = {name: value for name, value in os.environ.items() if name not in NOT_USUAL}
    found = {
        "plain": lambda: bare(usual, distributed=False),
        "bare": lambda: bare(usual, distributed=True),
        "dtk run": lambda: launched(usual),
    }
    if args.other:
        other = usual | {"PYTHONPATH": str(args.other.resolve())}
        found["other bare"] = lambda: bare(other, distributed=True)
        found["other dtk run"] = lambda: launched(other)
    return {name: found[name] for name in args.contenders} if args.contenders else found


def turn(start):
    """Seconds of every phase, and of the whole, for one start."""
    began = now()
    printed = start()
    ended = now()
    ranks = [json.loads(part.partition("\n")[0]) for part in printed.split("RESULT ")[1:]]
    if len(ranks) != args.workers:
        sys.exit(f"{len(ranks)} of {args.workers} processes said what they measured:\n{printed}")
    moments = [
        began,
        *(statistics.mean(rank[moment] for rank in ranks) for moment in list(PHASES)[:-1]),
        ended,
    ]
    seconds = {
        phase: after - before
        for phase, (before, after) in zip(PHASES, itertools.pairwise(moments), strict=True)
    }
    whole = dict(zip(PHASES, moments[1:], strict=True))
    return seconds | {text: whole[moment] - began for text, moment in WHOLE.items()}


def spread(seconds):
    low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return f"{middle:6.3f} ({low:.3f} - {high:.3f})"


def table(samples):
    """Medians and quartiles by phase and contender, and of the difference within each round."""
    names = list(samples)
    yield f"{'seconds':28}" + "".join(f"{name:>25}" for name in names)
    for key, text in {**PHASES, **{text: text for text in WHOLE}}.items():
        cells = [spread([turn[key] for turn in samples[name]]) for name in names]
        yield f"{text:28}" + "".join(f"{cell:>25}" for cell in cells)
    for less, more in itertools.pairwise(names):
        for text in WHOLE:
            pairs = zip(samples[less], samples[more], strict=True)
            gained = spread([b[text] - a[text] for a, b in pairs])
            yield f"{more} - {less}, {text}: {gained}"


def main():
    starts = contenders()
    samples = {name: [] for name in starts}
    if args.samples and args.samples.exists():
        samples = json.loads(args.samples.read_text())
    order = list(starts)
    for name in order:
        turn(starts[name])
    for number in range(args.rounds):
        for name in order if number % 2 else reversed(order):
            samples[name].append(turn(starts[name]))
    if args.samples:
        args.samples.write_text(json.dumps(samples))
    rounds = len(samples[order[0]])
    print(f"{args.workers} processes, {os.cpu_count()} cores, {rounds} rounds: medians, quartiles")
    print("\n".join(table(samples)))


if "DTK_BENCHMARK_RANK" in os.environ:
    train(distributed=os.environ["DTK_BENCHMARK_RANK"] == "1")
else:
    main()
