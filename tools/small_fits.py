"""Train hundreds of small models in one pair of processes, and say whether it ever hangs.

    python tools/small_fits.py                                  # an hour, over each communicator
    python tools/small_fits.py --minutes 5 --seed 7 --communicator mpi

Every fit is drawn from the seed: its data, model, exchange, callbacks, whether it validates, is
stopped early or fails, and in which thread it runs; or it is a loop of the script's own that reads
within its function. The collector runs all the time, the ranks share cores with a process that only
computes, and at random moments a rank is stopped for a while. After each fit both ranks must have
taken part in as many collectives, hold the same weights, and have no pipeline open. Where nothing
moves for a minute, the stacks of all threads of both ranks are kept, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fault_jobs import BIN

COMMUNICATORS = ("mpi", "collective", "horovod")
PART = 300.0  # seconds of each job
STILL = 60.0  # seconds without a new state of a rank, after which it hangs
SCRIPT = '''
"""What each rank runs; see tools/small_fits.py."""
import concurrent.futures, contextlib, faulthandler, gc, hashlib
import os, pathlib, random, signal, sys, time
folder, seed, seconds = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
stacks = open(folder / f"stacks-{os.getpid()}", "w")
faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
import dtk, keras, numpy as np, tensorflow as tf
from dtk.exchange import BlockMomentum, Delayed, Dense, ModelAveraging, Quantized, WarmStart
from dtk.strategies import AllReduceStrategy
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

gc.set_threshold(50, 5, 5)
world = AllReduceStrategy(self_test=False).world
rank, begun, posts = world.rank, time.monotonic(), 0
if world.name == "mpi":
    from dtk.communicators.mpi import transport

    own_call = transport.MPITransport._call

    def counted_call(self, lane, post, inputs, label, peer=None):
        def counted(*given):
            global posts
            posts += not label.startswith("eager")
            return post(*given)

        return own_call(self, lane, counted, inputs, label, peer)

    transport.MPITransport._call = counted_call


def tell(what):
    (folder / f"state-{rank}").write_text(f"{os.getpid()} {what}")


ROWS, N = 8, 5
rows = np.random.default_rng(0)
IDS = rows.integers(0, 30, (N * ROWS, 4))
LABELS = (IDS.sum(1, keepdims=True) % 2).astype("float32")


class Items(keras.utils.PyDataset):
    def __len__(self):
        return N

    def __getitem__(self, i):
        return IDS[i * ROWS : (i + 1) * ROWS], LABELS[i * ROWS : (i + 1) * ROWS]


def batches(late):
    for i in range(N):
        yield IDS[i * ROWS : (i + 1) * ROWS], LABELS[i * ROWS : (i + 1) * ROWS]
    time.sleep(late)


def endless():
    while True:
        yield from batches(0)


def dataset():
    return tf.data.Dataset.from_tensor_slices((IDS, LABELS)).batch(ROWS)


def generated(late):
    spec = tf.TensorSpec((None, 4), tf.int64), tf.TensorSpec((None, 1), tf.float32)
    made = tf.data.Dataset.from_generator(lambda: batches(late * rank), output_signature=spec)
    return made.map(lambda x, y: (x, y), num_parallel_calls=tf.data.AUTOTUNE)


def data_of(kind, late, strategy):
    if kind == "arrays":
        return {"x": IDS, "y": LABELS, "batch_size": ROWS}
    if kind == "items":
        return {"x": Items(workers=1 + rank % 2)}
    if kind == "endless":
        return {"x": dataset().repeat().shuffle(8, seed=1), "steps_per_epoch": 3}
    if kind == "broadcast":
        read = endless() if rank == 0 else None
        return {"x": dtk.data.broadcast_iterator(read, strategy), "steps_per_epoch": 3}
    if kind == "generator":
        return {"x": endless(), "steps_per_epoch": 3}
    return {"x": dataset() if kind == "dataset" else generated(late)}


class Evaluating(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.predict(IDS, batch_size=ROWS + 3, verbose=0)


class Ending(keras.callbacks.Callback):
    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def on_train_batch_end(self, batch, logs=None):
        if self.fails and batch == 1:
            raise KeyError("on purpose")
        self.model.stop_training = batch == 1


def built(draw, strategy):
    firsts = [keras.layers.Embedding(30, 3), keras.layers.CategoryEncoding(30, "one_hot")]
    first = draw.choice(firsts)
    layers = [keras.Input((4,), dtype="int64"), first, keras.layers.Flatten()]
    if draw.random() < 0.5:
        layers += [keras.layers.Dense(4), keras.layers.BatchNormalization(synchronized=True)]
    if draw.random() < 0.5:
        layers.append(keras.layers.Dropout(0.2))
    keras.utils.set_random_seed(draw.randrange(1000))
    with strategy.scope():
        return keras.Sequential([*layers, keras.layers.Dense(1)])


def fit(number, draw):
    exchanges = [None, None, None, "fp16", Quantized(4), Quantized(1), BlockMomentum(16)]
    exchanges += [ModelAveraging(8), Delayed(), Delayed(Dense("float16"))]
    exchanges += [WarmStart(Delayed(), samples=24)]
    exchange = draw.choice(exchanges)
    shard = exchange is None and draw.random() < 0.3
    strategy = AllReduceStrategy(exchange=exchange, shard_optimizer=shard, self_test=False)
    model = built(draw, strategy)
    settings = {}
    if "Delayed" in repr(exchange) and isinstance(model.layers[0], keras.layers.Embedding):
        return fit(number, draw)
    if exchange is None or exchange == "fp16":
        settings = draw.choice([{}, {"global_clipnorm": 0.1}, {"gradient_accumulation_steps": 2}])
    optimizer = draw.choice([keras.optimizers.SGD, keras.optimizers.Adam])(1e-2, **settings)
    with strategy.scope():
        model.compile(
            optimizer, "mse", metrics=draw.choice([[], ["mae"], ["mae", keras.metrics.AUC()]]),
            steps_per_execution=draw.choice([1, 1, 2, 3]),
        )
    kinds = ["arrays", "items", "endless", "broadcast", "generator", "dataset", "unknown"]
    kind, late = draw.choice(kinds), draw.choice([0, 0, 0.05])
    given = {"epochs": draw.randint(1, 3), "verbose": 0}
    if draw.random() < 0.5:
        valid = draw.choice(["arrays", "dataset", "unknown"])
        x = data_of(valid, late, strategy)
        given["validation_data"] = (x["x"], x["y"]) if valid == "arrays" else x["x"]
    ends = draw.choice([None, None, None, Ending(False), Ending(True)])
    callbacks = [Evaluating(), keras.callbacks.EarlyStopping("loss")]
    given["callbacks"] = [*draw.sample(callbacks, draw.randint(0, 2)), *filter(None, [ends])]
    tell(f"{number} fit {kind} {exchange} shard={shard} {settings} late={late} {given['epochs']}")
    for _ in range(draw.randint(1, 2)):
        # Anew: ranks have read ahead by other numbers of batches when a fit ends.
        given |= data_of(kind, late, strategy)
        with contextlib.suppress(KeyError):
            model.fit(**given)
    model.predict(IDS, batch_size=ROWS, verbose=0)  # which ends an open block of local steps
    return model.weights


def loop(number, draw):
    strategy = AllReduceStrategy(self_test=False)
    model = built(draw, strategy)
    optimizer = keras.optimizers.SGD(1e-2)
    optimizer.build(model.trainable_variables)
    steps, nested = draw.randint(1, 2), draw.random() < 0.5

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / ROWS
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    called = tf.function(step) if nested else step

    @tf.function
    def train(iterator):
        for _ in range(steps):
            strategy.reduce("sum", strategy.run(called, next(iterator)), None)

    given = draw.choice([dataset(), generated(draw.choice([0, 0.05]))])
    tell(f"{number} loop of {steps} steps, nested={nested}, {given}")
    read = strategy.experimental_distribute_dataset(given)
    for _ in range(draw.randint(1, 3)):
        iterator = iter(read)
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                train(iterator)
    return model.weights


def in_thread(work):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(work).result()
    world.keep_to_thread()
    return found


number = 0
while world.broadcast_object(time.monotonic() - begun < seconds):
    draw = random.Random(f"{seed} {number}")
    kind = loop if draw.random() < 0.2 else fit
    run = lambda: kind(number, draw)
    found = in_thread(run) if draw.random() < 0.2 else run()
    hashed = hashlib.sha256(b"".join(np.asarray(v.numpy()).tobytes() for v in found)).hexdigest()
    for _ in range(100):  # the thread that closes pipelines is another
        alive = sum(isinstance(one, OwnedIterator) for one in gc.get_objects())
        if kind is loop or not alive:
            break
        time.sleep(0.02)
    told = world.allgather_object((hashed, posts, world._met, alive if kind is fit else 0))
    state = (folder / f"state-{rank}").read_text()
    if told[0] != told[1] or told[0][3]:
        print(f"WRONG after {state}: {told}", flush=True)
        sys.exit(7)
    number += 1
print(f"ENDED {number} fits, {posts} posts in graphs, {world._met} outside", flush=True)
'''


def main() -> int:
    """Run jobs one after the other until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--communicator", choices=COMMUNICATORS)
    asked = parser.parse_args()
    names = [asked.communicator] if asked.communicator else list(COMMUNICATORS)
    until = time.monotonic() + 60 * asked.minutes
    part = min(PART, 60 * asked.minutes / len(names))
    number, failed = 0, 0
    while time.monotonic() < until - 5:
        name = names[number % len(names)]
        failed += not trained(name, asked.seed + 1000 * number, part)
        number += 1
    print(f"{number} jobs, {failed} failed")
    return int(failed > 0)


def trained(name: str, seed: int, seconds: float) -> bool:
    """Run one job; return whether it ended well."""
    folder = Path(tempfile.mkdtemp(prefix="dtk-fits-"))
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [str(BIN / "dtk"), "run", "-n", "2", "--no-bind", "--communicator", name]
    command += ["--stall-timeout", f"{5 * STILL:g}"]
    command += [str(script), str(folder), str(seed), str(seconds)]
    draw = random.Random(seed)
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONWARNINGS": "ignore"}
    with (folder / "output").open("w") as output, busy():
        job = subprocess.Popen(command, stdout=output, stderr=output, env=env)
        hung = watched(job, folder, draw)
    text = (folder / "output").read_text()
    ended = [line for line in text.splitlines() if "ENDED" in line]
    good = not hung and job.returncode == 0 and len(ended) == 2
    told = ended[0].partition("ENDED ")[2] if ended else "did not end"
    print(f"{name}, seed {seed}: {told if good else 'FAILED'}", flush=True)
    if not good:
        print(f"  {'hung, ' if hung else ''}see {folder}; its last output:")
        print("  " + "\n  ".join(text.splitlines()[-12:]))
    return good


def watched(job: subprocess.Popen[bytes], folder: Path, draw: random.Random) -> bool:
    """Stop and continue ranks until the job ends; return whether it hung, and end it then."""
    states, moved, strike = {}, time.monotonic(), time.monotonic() + 20
    while job.poll() is None:
        now = {file.name: file.read_text() for file in folder.glob("state-*")}
        if now != states:
            states, moved = now, time.monotonic()
        ranks = [int(text.split()[0]) for text in now.values() if text]
        if time.monotonic() - moved > STILL:
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
            time.sleep(3)
            print(f"  nothing has moved for {STILL:g} s: {now}", flush=True)
            job.terminate()
            job.wait(60)
            return True
        if ranks and time.monotonic() > strike:
            pid = draw.choice(ranks)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(draw.choice([0.05, 0.3, 2.0]))
                os.kill(pid, signal.SIGCONT)
            strike = time.monotonic() + draw.uniform(0.5, 8)
        time.sleep(0.1)
    return False


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keep a core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
