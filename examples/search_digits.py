"""A hyperparameter search on two workers: rate, width and dropout of a network for digits.

    dtk run -n 2 examples/search_digits.py
    python examples/search_digits.py                  # the same search in one process

Both workers train every trial together, and Optuna on rank 0 chooses its parameters. Trials that do
worse than the median of others are pruned early. The study is kept in a journal: start the script
again, with more trials or after a failure, and it goes on. Needs `pip install './dtk[search]'
matplotlib scikit-learn`.
"""

import argparse
import warnings

import dtk
import keras
import numpy as np
import optuna
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Search hyperparameters for digits with Optuna.")
parser.add_argument("--trials", type=int, default=16, help="in all, earlier runs included")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=128, help="the global batch")
parser.add_argument("--study", default="search_digits.journal", help="file that keeps the trials")
parser.add_argument("--plot", default="search_digits.png", help="picture of the study")
args = parser.parse_args()

strategy = dtk.auto_strategy()
optuna.logging.set_verbosity(optuna.logging.WARNING)

images, labels = load_digits(return_X_y=True)
images = images.astype("float32") / 16 - 0.5
order = np.random.default_rng(0).permutation(len(images))
images, labels = images[order], labels[order]
train, validation = (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def objective(trial):
    # The same on every rank: rank 0 asks Optuna.
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    width = trial.suggest_int("width", 8, 128, log=True)
    dropout = trial.suggest_float("dropout", 0.0, 0.6)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(width, activation="gelu"),
                keras.layers.Dropout(dropout),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(
        *train,
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=validation,
        verbose=0,
        callbacks=[dtk.search.PruningCallback(trial, monitor="val_accuracy")],
    )
    return max(history.history["val_accuracy"])


def tell(study, trial):
    """Called on rank 0 after every trial."""
    chosen = ", ".join(f"{name} {value:.3g}" for name, value in trial.params.items())
    after = f"after {len(trial.intermediate_values)} epochs"
    worth = "failed" if trial.value is None else f"accuracy {trial.value:.4f}"
    print(f"trial {trial.number}: {chosen}: {worth} ({trial.state.name.lower()} {after})")


def plot(study, file):
    """Values of the trials, what they learned by epoch, and what the parameters did."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from optuna.visualization import matplotlib as plots

    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    pictures = []
    for draw in (
        plots.plot_optimization_history,
        plots.plot_intermediate_values,
        plots.plot_slice,
    ):
        name = "accuracy" if draw is not plots.plot_intermediate_values else None
        axes = np.ravel(draw(study, target_name=name) if name else draw(study))
        figure = axes[0].figure
        figure.set_size_inches(12, 4.5)
        figure.set_layout_engine("constrained")
        figure.canvas.draw()
        pictures.append(np.asarray(figure.canvas.buffer_rgba()))
    pyplot.imsave(file, np.concatenate(pictures))


study = None
if strategy.is_chief:
    backend = optuna.storages.journal.JournalFileBackend(args.study)
    study = optuna.create_study(
        study_name="digits",
        storage=optuna.storages.JournalStorage(backend),
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=1),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=2),
    )

# Every rank gets the results.
study = dtk.search.optimize(
    study, objective, n_trials=args.trials, strategy=strategy, callbacks=[tell], seed=1
)

if strategy.is_chief:
    best = study.best_trial
    print(f"\nbest of {len(study.trials)} trials, with {strategy.size} worker(s): {best.number}")
    print(f"validation accuracy {best.value:.4f} with {best.params}")
    plot(study, args.plot)
    print(f"{args.plot} shows the study")
