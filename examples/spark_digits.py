"""Handwritten digits on Apache Spark: each rank reads its own rows of a DataFrame, from Parquet.

    python examples/spark_digits.py --master "local[2]"      # two ranks on this machine

On a cluster give it to spark-submit, without --master, and with --folder where all executors write.
"""

import argparse
import tempfile

import dtk.engines.spark
import numpy as np
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Train on digits on Spark's executors.")
parser.add_argument("--master", help="Spark's master; by default what spark-submit has set")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--folder", help="where all executors read and write; by default of this host")


def train(folder, epochs):
    import os

    import dtk
    import keras
    import pyarrow.dataset
    import tensorflow as tf

    strategy = dtk.auto_strategy()
    keras.utils.set_random_seed(1)
    files = list(pyarrow.dataset.dataset(os.path.join(folder, "digits")).get_fragments())
    groups = [group for file in files for group in file.split_by_row_group()]
    tables = [group.to_table() for group in groups[strategy.rank :: strategy.size]]
    images = np.concatenate([np.stack(table["image"].to_numpy()) for table in tables])
    labels = np.concatenate([table["label"].to_numpy() for table in tables])
    print(f"{len(labels)} rows of {len(groups)} row groups")

    rows = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(labels), seed=1)
    batches = rows.batch(128 // strategy.size)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(0.003),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(
        strategy.distribute_datasets_from_function(lambda context: batches),
        epochs=epochs,
        verbose=0,
        shuffle=False,  # the rows are
        # from where it was, when Spark starts the ranks again
        callbacks=[dtk.callbacks.Checkpoint(os.path.join(folder, "saved"))],
    )
    return history.history["accuracy"][-1], strategy.size


def main(args, folder):
    builder = SparkSession.builder.config("spark.ui.showConsoleProgress", False)
    session = (builder.master(args.master) if args.master else builder).getOrCreate()
    images, labels = load_digits(return_X_y=True)
    data = [(image.tolist(), int(label)) for image, label in zip(images / 16, labels, strict=True)]
    frame = session.createDataFrame(data, "image array<float>, label int")
    frame.repartition(2 * args.workers).write.mode("overwrite").parquet(f"{folder}/digits")
    accuracy, size = dtk.engines.spark.run(train, args.workers, args=(folder, args.epochs))
    print(f"accuracy {accuracy:.4f} on {size} ranks of Spark")
    session.stop()


if __name__ == "__main__":
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        main(args, args.folder or folder)
