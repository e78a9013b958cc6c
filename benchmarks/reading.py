"""What each rank reads and computes of a pipeline, by the number of ranks.

    python benchmarks/reading.py                        # 1, 2 and 4 ranks; prints a table
    python benchmarks/reading.py -n 1 2 --kinds folders

Every rank reads what it would in some epochs of `fit`, without a model. Bytes are those of the
first epoch (`rchar` of /proc/self/io), CPU seconds those of the later ones, when all is traced:
median, and range in brackets. Given are those of the rank with the largest, and N times the median
beside that of one process, which is 1 if a rank does 1/N.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

IMAGES, SIDE, BATCH = 128, 384, 32
ROWS = 2048  # of arrays, which are in memory
EPOCHS = 3  # whose CPU seconds are measured

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("-n", "--ranks", type=int, nargs="+", default=[1, 2, 4])
parser.add_argument("--kinds", nargs="+", default=["records", "folders", "PyDataset", "arrays"])
parser.add_argument("--read", type=Path, metavar="DIR", help=argparse.SUPPRESS)
args = parser.parse_args()


def make_images(folder):
    """Write the same JPEG images as files in two folders and as four TFRecord files."""
    import numpy as np
    import tensorflow as tf

    draw = np.random.default_rng(0)
    writers = [tf.io.TFRecordWriter(str(folder / f"{i}.tfrecord")) for i in range(4)]
    for i in range(IMAGES):
        coarse = draw.integers(0, 230, [SIDE // 8, SIDE // 8, 3], np.uint8)
        noise = draw.integers(0, 24, [SIDE, SIDE, 3], np.uint8)
        jpeg = tf.io.encode_jpeg(np.kron(coarse, np.ones([8, 8, 1], np.uint8)) + noise).numpy()
        name = folder / "images" / f"class{i % 2}" / f"{i:05}.jpg"
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(jpeg)
        writers[i * 4 // IMAGES].write(jpeg)
    for writer in writers:
        writer.close()


def make_pipeline(kind, folder, strategy):
    """Make a pipeline of the usual sort: decode, shuffle, flip at random, put into batches."""
    import dtk
    import keras
    import numpy as np
    import tensorflow as tf
    from dtk.compat import keras_data

    def decode(jpeg):
        return tf.image.resize(tf.io.decode_jpeg(jpeg, channels=3), [128, 128])

    if kind == "records":
        names = sorted(map(str, folder.glob("*.tfrecord")))
        images = tf.data.TFRecordDataset(names).map(decode, num_parallel_calls=tf.data.AUTOTUNE)
        flipped = images.shuffle(256).map(tf.image.random_flip_left_right)
        return flipped.batch(BATCH).prefetch(tf.data.AUTOTUNE)
    if kind == "arrays":
        images = np.random.default_rng(0).random([ROWS, 96, 96, 3], np.float32)
        return keras_data.ArrayDataAdapter(images, batch_size=BATCH, shuffle=True).get_tf_dataset()
    if kind == "folders":
        return keras.utils.image_dataset_from_directory(
            folder / "images", image_size=(128, 128), batch_size=BATCH, seed=1, verbose=False
        )

    class Images(keras.utils.PyDataset):
        """Each item is the batch of one rank."""

        names = sorted(folder.glob("images/*/*.jpg"))

        def __len__(self):
            return IMAGES // 8

        def __getitem__(self, index):
            names = self.names[index * 8 : index * 8 + 8]
            return tf.stack([decode(name.read_bytes()) for name in names]).numpy()

    return dtk.data.shard(Images(), strategy)


def read(kind, folder, strategy):
    """Read some epochs; return bytes and CPU seconds of this rank."""
    import keras

    keras.utils.set_random_seed(1)
    made = make_pipeline(kind, folder, strategy)
    if not hasattr(made, "whole"):  # shard has given each rank its own
        made = strategy.experimental_distribute_dataset(made)
    bytes_read = read_so_far()
    rows = sum(len(batch[0] if isinstance(batch, tuple) else batch) for batch in made)
    bytes_read = read_so_far() - bytes_read
    seconds = []
    for _ in range(EPOCHS):
        seconds.append(-cpu_so_far())
        for _ in made:
            pass
        seconds[-1] += cpu_so_far()
    return {"kind": kind, "rows": rows, "MB": [bytes_read / 1e6], "CPU s": seconds}


def read_all(folder):
    import dtk

    strategy = dtk.auto_strategy()
    for kind in args.kinds:
        print("READ", json.dumps(read(kind, folder, strategy)), flush=True)


def read_so_far():
    """Bytes that this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def cpu_so_far():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(ranks, folder):
    """Return, by kind, the numbers of the rank with the largest median."""
    command = [sys.executable, "-m", "dtk", "run", "-n", str(ranks), __file__]
    command += ["--read", str(folder), "--kinds", *args.kinds]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    out = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    lines = [json.loads(line.split("READ ")[1]) for line in out.splitlines() if "READ " in line]
    found = {}
    for kind in args.kinds:
        each = [line for line in lines if line["kind"] == kind]
        rows = ROWS if kind == "arrays" else IMAGES
        assert len(each) == ranks and sum(one["rows"] for one in each) == rows, out
        found[kind] = {
            what: max((one[what] for one in each), key=median) for what in ("MB", "CPU s")
        }
    return found


def main():
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder))
        found = {ranks: measure(ranks, folder) for ranks in args.ranks}
    print("| | ranks | MB read | of one process, x N | CPU s | of one process, x N |")
    print("|---|---|---|---|---|---|")
    for kind in args.kinds:
        for ranks in args.ranks:
            cells = []
            for what, numbers in found[ranks][kind].items():
                value, one = median(numbers), median(found[args.ranks[0]][kind][what])
                spread = f" [{min(numbers):.2f}, {max(numbers):.2f}]" if len(numbers) > 1 else ""
                share = f"{value / one * ranks:.2f}" if one > 0.01 else "-"
                cells.append(f"{value:.2f}{spread} | {share}")
            print(f"| {kind} | {ranks} | {' | '.join(cells)} |")


if args.read:
    read_all(args.read)
else:
    main()
