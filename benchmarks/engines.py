"""A step of each model where an engine has started the ranks, beside `dtk run`, in turns.

    python benchmarks/engines.py             # with Ray and pyspark, where they are installed

Two ranks with one thread each. Pods are ranks in two network namespaces that know what the kubelet
would tell them, and so need root.
"""

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dtk.launch.plan import HUGE_PAGES

import hosts

FIRST = 2  # epochs that are not counted
STEPS = {"resnet20": 20, "mlp": 40, "transformer": 40, "embedding": 600}
OTHERS = {"DTK_COMMUNICATOR": "collective"}
RESULT = "RESULT "


def measure(name, steps, epochs):
    """Train; return the communicator's name and milliseconds of a step, the median of epochs."""
    import dtk
    import keras
    import tensorflow as tf
    from dtk.bench.models import PROBLEMS

    strategy = dtk.auto_strategy()
    with strategy.scope():
        model = PROBLEMS[name].compiled(keras)
    batch, times = 32 * strategy.size, []
    rows = tf.data.Dataset.from_tensor_slices(PROBLEMS[name].data(4 * batch))

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            times.append(1e3 * (time.perf_counter() - self.began) / steps)

    data = rows.batch(batch, drop_remainder=True).repeat()
    how = {"steps_per_epoch": steps, "epochs": epochs, "verbose": 0}
    model.fit(data, callbacks=[Clock()], **how)
    return strategy.communicator.name, statistics.median(times[FIRST:])


def on_ray(*args):
    import ray
    from dtk.engines.ray import KerasTrainer

    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told")

        def train():
            import ray.train

            found = measure(*args)
            if ray.train.get_context().get_world_rank() == 0:
                told.write_text(json.dumps(found))

        ray.init(num_cpus=2, logging_level="ERROR")
        run = ray.train.RunConfig(storage_path=folder)
        KerasTrainer(
            train, scaling_config=ray.train.ScalingConfig(num_workers=2), run_config=run
        ).fit()
        return json.loads(told.read_text())


def on_spark(*args):
    from dtk.engines import spark
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    SparkSession.builder.master("local[2]").getOrCreate()
    return spark.run(measure, 2, args)


HERE = {"rank": measure, "ray": on_ray, "spark": on_spark}


def command(how, args):
    return [sys.executable, __file__, "--as", how, *map(str, args)]


def read(stdout, stderr):
    if RESULT not in stdout:
        raise SystemExit(f"{stdout[-2000:]}\n{stderr[-4000:]}")
    return json.loads(stdout.partition(RESULT)[2].splitlines()[0])


def started(how, args, variables, before=()):
    """The result of one command."""
    done = subprocess.run(
        [*before, *command(how, args)[1 if before else 0 :]],
        env={**os.environ, **hosts.ONE_THREAD, "DTK_STEP_SETTINGS": "0", **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return read(done.stdout, done.stderr)


def by_variables(args, of_ranks, shell=(), at=("", "")):
    """The result of ranks that know their places by variables."""
    ranks = [
        subprocess.Popen(
            [*shell, host, shlex.join(command("rank", args))] if shell else command("rank", args),
            env={**os.environ, **hosts.ONE_THREAD, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host, variables in zip(at, of_ranks, strict=True)
    ]
    outputs = [one.communicate(timeout=600) for one in ranks]
    return read(*outputs[0])


def contenders(stack):
    """What is measured, by name: a function of what to measure."""
    run = [sys.executable, "-m", "dtk.cli.main", "run", "--no-bind"]  # engines bind nothing
    joined = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}

    def torchrun(args, how):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = {"MASTER_PORT": str(probe.getsockname()[1])}
        return by_variables(
            args, [{**joined, **port, **how, "RANK": r, "LOCAL_RANK": r} for r in "01"]
        )

    found = {
        "`dtk run`": lambda args: started("rank", args, {}, [*run, "-n", "2"]),
        "torchrun": lambda args: torchrun(args, {}),
        "torchrun, collectives": lambda args: torchrun(args, OTHERS),
    }
    if importlib.util.find_spec("ray"):
        found["Ray"] = lambda args: started("ray", args, {})
    if importlib.util.find_spec("pyspark"):
        found["Spark"] = lambda args: started("spark", args, {})
    if os.getuid() == 0:
        at, shell = stack.enter_context(hosts.hosts(2))
        two = ["--hosts", ",".join(f"{one}:1" for one in at), "--remote-shell", shell]
        told = {"WORLD_SIZE": "2", "MASTER_ADDR": at[0], "MASTER_PORT": "4100"}
        told |= HUGE_PAGES  # as the image of examples/kubernetes

        def pods(args, how):
            indices = [{**told, **how, "JOB_COMPLETION_INDEX": r} for r in "01"]
            return by_variables(args, indices, [shell], at)

        found["two hosts: `dtk run`"] = lambda args: started("rank", args, {}, [*run, *two])
        found["two hosts: pods"] = lambda args: pods(args, {})
        found["two hosts: pods, collectives"] = lambda args: pods(args, OTHERS)
    return found


def main():
    parser = argparse.ArgumentParser(prog="engines", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=7, help=f"the first {FIRST} do not count")
    parser.add_argument("--models", nargs="+", choices=STEPS, default=list(STEPS))
    args = parser.parse_args()
    times, names = collections.defaultdict(list), {}
    with contextlib.ExitStack() as stack:
        arms = contenders(stack)
        for _ in range(args.rounds):
            for model in args.models:
                for arm, take in random.sample([*arms.items()], len(arms)):
                    name, taken = take((model, STEPS[model], args.epochs))
                    if names.setdefault(arm, name) != name:
                        raise SystemExit(f"{arm} went by {names[arm]}, and now by {name}")
                    times[arm, model].append(taken)
                    print(f"{time.strftime('%X')} {arm}: {model} {taken:.2f}", file=sys.stderr)
    print(f"| ms a step | by | {' | '.join(args.models)} |\n|---|---|{'---|' * len(args.models)}")
    for arm in arms:
        peer = "two hosts: `dtk run`" if arm.startswith("two") else "`dtk run`"
        cells = []
        for model in args.models:
            own, other = (statistics.median(times[one, model]) for one in (arm, peer))
            spread = f"{min(times[arm, model]):.1f} - {max(times[arm, model]):.1f}"
            cells.append(f"{own:.1f} ({spread}), {own / other:.2f}")
        print(f"| {arm} | {names[arm]} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        how, name, steps, epochs = sys.argv[2:]
        print(RESULT + json.dumps(HERE[how](name, int(steps), int(epochs))), flush=True)
    else:
        main()
