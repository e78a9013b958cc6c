"""Digits on Ray: it starts the workers, and starts them again if one is lost.

    python examples/ray_digits.py                     # two workers on this machine
    python examples/ray_digits.py --kill              # ... of which one is killed in the middle

The killed run ends with the same accuracy: Ray keeps a checkpoint of each epoch, and the workers
resume from it. On a cluster set RAY_ADDRESS, and --storage to what all nodes see. Needs `pip
install './dtk[ray]' scikit-learn`.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

import ray
import ray.train
from dtk.engines.ray import KerasTrainer


def train(config):
    """Run in each worker."""
    import dtk
    import keras
    import numpy as np
    from dtk.engines.ray import ReportToRay
    from sklearn.datasets import load_digits

    strategy = dtk.strategies.AllReduceStrategy()
    keras.utils.set_random_seed(1)
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    order = np.random.default_rng(0).permutation(len(images))
    learn, test = order[:1437], order[1437:]

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])

    class KillOnce(keras.callbacks.Callback):
        """Kill the last rank, unless it was killed before."""

        def on_epoch_begin(self, epoch, logs=None):
            killed, is_last = Path(config["killed"]), strategy.rank == strategy.size - 1
            if is_last and epoch == config["epochs"] // 2 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    callbacks = [ReportToRay(), *([KillOnce()] if config["killed"] else [])]
    model.fit(
        images[learn],
        labels[learn],
        batch_size=64,
        epochs=config["epochs"],
        validation_data=(images[test], labels[test]),
        verbose=0,
        callbacks=callbacks,
    )


parser = argparse.ArgumentParser(description="Train on scikit-learn's digits, on Ray.")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--storage", default="", help="folder of results, which all nodes see")
parser.add_argument("--kill", action="store_true", help="kill a worker in the middle")

if __name__ == "__main__":
    args = parser.parse_args()
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # epochs are short
    ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        storage = os.path.abspath(args.storage or folder)
        killed = f"{storage}/killed" if args.kill else ""
        result = KerasTrainer(
            train,
            {"epochs": args.epochs, "killed": killed},
            scaling_config=ray.train.ScalingConfig(num_workers=args.workers),
            run_config=ray.train.RunConfig(
                storage_path=storage,
                failure_config=ray.train.FailureConfig(max_failures=2),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            ),
        ).fit()
        numbers = result.metrics
        print(f"epoch {numbers['epoch']}: loss {numbers['loss']:.4f}")
        print(f"test accuracy {numbers['val_accuracy']:.4f} with {args.workers} workers of Ray")
        print(f"{result.checkpoint.path} has {', '.join(os.listdir(result.checkpoint.path))}")
    ray.shutdown()
