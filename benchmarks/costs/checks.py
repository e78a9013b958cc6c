"""What it costs that ranks find out when they disagree, and that metrics are those of all ranks.

The checks are measured where they happen, in `fit`, by a clock around each; what they wait for the
other ranks is in it. Digests of batches are computed by the input pipeline, beside the steps: what
they take is that of reading the pipeline with them less that of reading it without. Metrics are
measured by training with and without, under dtk and, for what computing them takes, with plain
`fit` on every rank's own rows.
"""

import contextlib
import time

import keras
import tensorflow as tf
from dtk.bench.variant import Fit
from dtk.input import digests, slicing
from dtk.trainer import fit
from dtk.trainer.ranks import rank_checks
from dtk.trainer.replica import replica_step

import report
from fits import mean_of_ranks, take, warm, watched
from models import PROBLEMS

EPOCH = 100  # steps
PART = report.at_most(1.0)  # percent


def measure(setting, strategy):
    with watched(replica_step, "check_reduced") as traced:
        variants = metered(setting, strategy)
        warm(variants)
    with (
        watched(rank_checks, "check_same_call") as calls,
        watched(rank_checks, "check_same_batch") as firsts,
        watched(fit.RankChecks, "on_train_begin") as begins,
        watched(fit.RankChecks, "on_train_batch_end") as batches,
        watched(fit.RankChecks, "on_epoch_end") as ends,
    ):
        seconds = take(variants, setting.rounds, strategy.communicator)
    spent = mean_of_ranks(
        {
            "given": [call.seconds for call in calls],
            "batch": [call.seconds for call in firsts],
            "digests": digest_seconds(setting, strategy),
            "begin": [call.seconds for call in begins],
            "first": [call.seconds for call in batches if call.args[1] == 0],
            "later": [call.seconds for call in batches if call.args[1] > 0],
            "each": [call.seconds for call in ends],
            "traced": [call.seconds for call in traced],
        },
        strategy.communicator,
    )
    return [*metrics_table(setting, seconds), "", *checks_table(spent, seconds)]


def metered(setting, strategy):
    """`fit` under dtk and plain, with accuracy and without."""
    problem, communicator = PROBLEMS[setting.model], strategy.communicator
    count = (setting.steps + 1) * setting.batch_size
    x, y = problem.data(count * strategy.size)
    whole = {"x": x, "y": y, "batch_size": setting.batch_size * strategy.size}
    own = slice(strategy.rank * count, (strategy.rank + 1) * count)
    part = {"x": x[own], "y": y[own], "batch_size": setting.batch_size}
    variants = []
    for name, scope, data in (
        ("dtk", strategy.scope, whole),
        ("plain", contextlib.nullcontext, part),
    ):
        for metrics in ([], ["accuracy"]):
            with scope():
                model = problem.compiled(keras)
                model.compile(keras.optimizers.SGD(0.01), model.loss, metrics=metrics)
            named = " ".join([name, *metrics])
            variants.append(Fit(named, model, data, setting.steps, communicator))
    return variants


def digest_seconds(setting, strategy):
    """Seconds that the digests of an epoch's batches add to reading them, by round."""
    size = strategy.size
    data = PROBLEMS[setting.model].data(setting.batch_size * size)
    batch = tf.data.Dataset.from_tensors(data).repeat(EPOCH)
    plain, digested = (
        slicing.cut_dataset(batch, strategy.local_ranks(), size, digest)
        for digest in (None, digests.digest_of)
    )
    _read(plain), _read(digested)
    return [_read(digested) - _read(plain) for _ in range(setting.rounds)]


def _read(dataset):
    began = time.perf_counter()
    for _ in dataset:
        pass
    return time.perf_counter() - began


def metrics_table(setting, seconds):
    rows = []
    for name in ("dtk", "plain"):
        cells = report.compared(seconds[f"{name} accuracy"], seconds[name], PART)
        rows.append([f"{setting.model}, {name}", *cells[:3]])
    header = "`fit`|with accuracy, ms per step|without, ms per step|with / without"
    return report.markdown(header, rows)


def checks_table(spent, seconds):
    """What is spent in an epoch of EPOCH steps, by check, and as a part of it."""
    epoch = EPOCH * report.median(seconds["dtk"])
    # What does not belong to one `fit` of the rounds counts with its median.
    later = (EPOCH - 1) * report.median(spent["later"])
    later += report.median(spent["digests"])
    names = ("given", "batch", "begin", "first", "each")
    parts = zip(*(spent[name] for name in names), strict=True)
    rows = [
        ["a process: gradients were reduced, when traced", spent["traced"], None],
        ["a `fit`: data and callbacks compared", spent["given"], None],
        ["a `fit`: first batch compared", spent["batch"], None],
        ["a `fit`: digests of its batches, in the input pipeline", spent["digests"], None],
        ["a `fit`: shapes, seeds and weights compared", spent["begin"], None],
        ["a `fit`: weights compared after its first step", spent["first"], None],
        ["an epoch: weights compared, stopping agreed", spent["each"], PART],
        ["all of these, in a `fit` of one epoch", [sum(one) + later for one in parts], PART],
        ["every step: accuracy summed over workers", list(_of_metrics(seconds)), PART],
    ]
    header = f"once|ms in an epoch of {EPOCH} steps|% of it|target, %|"
    return report.markdown(header, [_check_row(*row, epoch) for row in rows])


def _of_metrics(seconds):
    """What accuracy adds to an epoch under dtk beyond what it adds to plain `fit`, by round."""
    names = ("dtk accuracy", "dtk", "plain accuracy", "plain")
    for with_it, without, computed, nothing in zip(*map(seconds.get, names), strict=True):
        yield EPOCH * (with_it - without - (computed - nothing))


def _check_row(what, spent, target, epoch):
    parts = [100 * one / epoch for one in spent]
    verdict = target.cells(report.median(parts)) if target else ["", ""]
    return [what, report.spread(spent, report.MS), report.spread(parts), *verdict]
