"""What cannot work is refused: arguments when a callback is made, the rest before a first step."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.callbacks import (
    AutoBatchSize,
    BatchNormStatistics,
    BatchSizeSchedule,
    BroadcastVariables,
    Checkpoint,
    CommunicationStats,
    CrossValidation,
    FindNonFinite,
    GrowBatchInsteadOfDecay,
    HalveRate,
    LearningRateScaling,
    MomentumSchedule,
    ProgressPrinter,
    SampleRate,
    ServerReport,
)
from dtk.exchange import BlockMomentum, Delayed, WarmStart

from callbacks.bodies import MANY, compiled, data, fails, strategy

NAN, INF = math.nan, math.inf

ARGUMENTS = {
    BatchSizeSchedule: [
        ((schedule,), "batch size schedule")
        for schedule in ([], 64, "64", [0], [-1], [1.5], [True], [(0, 8)], [(2, 0)], [None])
    ],
    GrowBatchInsteadOfDecay: [
        *(
            ((schedule,), "learning rate schedule")
            for schedule in ([], 0.1, "0.1", [0.0], [-1.0], [True], [None], [(0, 0.1)], [NAN])
        ),
        (([0.1], 0), "max_batch_size must be an integer of at least 1, or None .* got 0"),
    ],
    AutoBatchSize: [
        ((0,), "frequency must be an integer of at least 1, got 0"),
        ((1, 0.5), "trial_batches must be"),
        ((1, 1, -1), "margin must be 0 or more"),
        ((1, 1, 0.01, 1, 0), "multiple must be"),
    ],
    SampleRate: [
        ((0.0,), "rate per sample schedule holds values"),
        (([],), "needs at least one value"),
        ((0.1, -1), "time constant schedule holds values"),
        ((0.1, "24"), "a time constant schedule is a list"),
    ],
    MomentumSchedule: [
        (([0, INF],), "a finite number, 0 or more"),
        ((24, 0), "every_samples must be an integer"),
        ((24, 1, 0), "batch_size must be an integer"),
    ],
    LearningRateScaling: [
        *((("cubic",), "rule must be"), ((0,), "rule must be")),
        *((("linear", n), "warmup_epochs must be a finite number") for n in (-1, NAN, INF)),
    ],
    CrossValidation: [
        ((0, print, None), "every_samples must be an integer of at least 1, got 0"),
        ((1, "print", None), "callback must be a function, got 'print'"),
        ((1, print, None), "the cross-validation data is missing"),
        ((1, print, (0, 0), 0), "batch_size must be an integer of at least 1"),
    ],
    HalveRate: [
        ((1, (0, 0), 1.0), "gain must be 0 or more and less than 1"),
        ((1, (0, 0), 0.1, -1), "cuts must be an integer of at least 0"),
    ],
    BatchNormStatistics: [
        ((np.zeros((2, 2)), 0), "batches must be an integer of at least 1, got 0")
    ],
    FindNonFinite: [(("stop",), "action must be 'raise' or 'say', got 'stop'")],
    ProgressPrinter: [((-1,), "got -1")],
}
CHECKPOINT = [
    ({"directory": "gs://bucket/run"}, "'gs://bucket/run' is an address, .* mount it"),
    *(({"max_to_keep": given}, f"max_to_keep must be .*{given}") for given in (0, 2.5, True)),
    *(({"save_freq": given}, f"save_freq must be .*{given}") for given in (0, 1.5, True, "batch")),
    *(
        ({"save_every_samples": given}, f"save_every_samples must be .*{given}")
        for given in (0, -1, True, 1.5, "1000", NAN)
    ),
    ({"save_freq": 5, "save_every_samples": 9}, "save_freq=5 and save_every_samples=9 were both"),
    *(({"on_save_error": given}, "must be 'warn' or 'raise'") for given in ("ignore", None, True)),
    ({"monitor": "speed"}, "give mode"),
    ({"monitor": "loss", "mode": "least"}, "'auto', 'min' or 'max'"),
    ({"monitor": 5}, "monitor=5; expected the name of a number of the logs"),
    ({"monitor": ""}, "monitor=''; expected the name"),
    *(
        ({"directory": given}, f"directory={given!r}; expected the path of a folder")
        for given in (None, "", 7)
    ),
]


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments(kind):
    for arguments, message in ARGUMENTS[kind]:
        with pytest.raises(ValueError, match=message):
            kind(*arguments)


def test_arguments_of_checkpoint():
    for arguments, message in CHECKPOINT:
        with pytest.raises(ValueError, match=message):
            Checkpoint(**{"directory": "somewhere", **arguments})
    assert Checkpoint("x", monitor="val_auc").larger_is_better
    assert not Checkpoint("x", monitor="val_mean_absolute_error").larger_is_better
    assert Checkpoint("x", monitor="speed", mode="max").larger_is_better


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return data(4)


def sgd(rate=0.1, momentum=0.9):
    return keras.optimizers.SGD(rate, momentum=momentum)


def decaying():
    return sgd(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9))


def adam():
    return keras.optimizers.Adam()


def without_momentum():
    return sgd(momentum=0.0)


class Own(keras.Sequential):
    def train_step(self, batch):
        return super().train_step(batch)


def own_steps(optimizer):
    with strategy().scope():
        model = Own([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
    return model


def of_a_function():
    return keras.optimizers.SGD(lambda: 0.1)


# Callbacks, made when they are used: TensorFlow's collectives must come before the first tensor;
# what else is given; what is said.
FITS = [
    (
        lambda: [BatchSizeSchedule([8])],
        {"data": "PyDataset"},
        "a PyDatasetAdapter cannot be changed during fit; give fit arrays or a tf.data.Dataset",
    ),
    (
        lambda: [GrowBatchInsteadOfDecay([0.1], max_batch_size=4)],
        {},
        "max_batch_size=4 is smaller than the batch to begin with, 8",
    ),
    (lambda: [GrowBatchInsteadOfDecay([0.1])], {"data": "dataset"}, "give batch_size="),
    (
        lambda: [GrowBatchInsteadOfDecay([0.1])],
        {"optimizer": decaying},
        "GrowBatchInsteadOfDecay sets the learning rate, but the optimizer computes its own",
    ),
    (
        lambda: [GrowBatchInsteadOfDecay([0.1]), BatchSizeSchedule([8])],
        {},
        "GrowBatchInsteadOfDecay and BatchSizeSchedule would set the same batch size",
    ),
    (
        lambda: [GrowBatchInsteadOfDecay([0.1]), LearningRateScaling()],
        {},
        "GrowBatchInsteadOfDecay and LearningRateScaling would set the same learning rate",
    ),
    (
        lambda: [GrowBatchInsteadOfDecay(lambda epoch: 0.1 - 0.1 * epoch)],
        {},
        "the learning rate of epoch 1 must be above 0",
    ),
    (lambda: [AutoBatchSize()], {"data": "dataset"}, "give batch_size="),
    (lambda: [AutoBatchSize()], {"optimizer": decaying}, "computes its own"),
    (
        lambda: [AutoBatchSize(), BatchSizeSchedule([8])],
        {},
        "AutoBatchSize and BatchSizeSchedule would set the same batch size",
    ),
    (
        lambda: [SampleRate(0.01)],
        {},
        "give time_constant=76 for what it is at 8, or 0 for none",
    ),
    (
        lambda: [SampleRate(0.01, 24)],
        {"optimizer": without_momentum},
        "give SGD any momentum above 0",
    ),
    (
        lambda: [MomentumSchedule(24)],
        {"optimizer": without_momentum},
        "give SGD any momentum above 0",
    ),
    (
        lambda: [MomentumSchedule(24)],
        {"optimizer": adam},
        "sets the momentum of keras.optimizers.SGD, and the optimizer is a Adam",
    ),
    (lambda: [SampleRate(0.01, 24)], {"optimizer": adam}, "is for keras.optimizers.SGD"),
    (
        lambda: [SampleRate(0.01, 24)],
        {"optimizer": decaying},
        "SampleRate sets the learning rate, but the optimizer computes its own",
    ),
    (lambda: [SampleRate(0.01, 24), MomentumSchedule(24)], {}, "would set the same momentum"),
    (lambda: [LearningRateScaling(), SampleRate(0.01, 24)], {}, "would set the same learning rate"),
    (
        lambda: [SampleRate(0.01, 24)],
        {"exchange": BlockMomentum(64)},
        "workers take steps of their own",
    ),
    (
        lambda: [SampleRate(0.01, 24)],
        {"exchange": WarmStart(Delayed(), samples=10)},
        "gradients are applied a step late",
    ),
    (
        lambda: [HalveRate(16, data()), GrowBatchInsteadOfDecay([0.1])],
        {},
        "add SampleRate(rate per sample), which takes both into account",
    ),
    (lambda: [HalveRate(16, data())], {"optimizer": decaying}, "HalveRate sets the learning rate"),
    (
        lambda: [LearningRateScaling()],
        {"optimizer": of_a_function},
        "give it a number or a LearningRateSchedule",
    ),
    (
        lambda: [LearningRateScaling(), LearningRateScaling()],
        {},
        "2 LearningRateScaling callbacks in one fit",
    ),
    (
        lambda: [LearningRateScaling(warmup_epochs=1)],
        {"data": "generator"},
        "warmup_epochs needs to know how many steps an epoch has",
    ),
    (
        lambda: [BatchNormStatistics(data()[0])],
        {},
        "has no BatchNormalization that is trained",
    ),
    (
        lambda: [CrossValidation(20, print, data(), monitor="accuracy")],
        {},
        "monitor='accuracy' is not among the numbers of evaluate (loss, mae)",
    ),
    (
        lambda: [CrossValidation(20, print, data())],
        {"data": "dataset", "model": own_steps},
        "a train_step or test_step of its own",
    ),
    (lambda: [BroadcastVariables(-1)], {}, "root_rank=-1 is outside the world of 1"),
    (lambda: [BroadcastVariables(1)], {}, "root_rank=1 is outside the world of 1"),
    (
        lambda: [Checkpoint("there"), Checkpoint("there/.")],
        {},
        "two Checkpoint callbacks write to there",
    ),
    (lambda: [ServerReport()], {}, "AllReduceStrategy has no parameter servers"),
]


def refused():
    """What is said to each."""
    chosen, told = strategy(), []
    x, y = data(MANY)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    given = {
        "arrays": {"x": x, "y": y, "batch_size": 8},
        "dataset": {"x": rows},
        "generator": {"x": rows.filter(lambda x, y: True)},
        "PyDataset": {"x": Batches()},
    }
    for make, how, _ in FITS:
        chosen.exchange = how.get("exchange")
        model = how.get("model", compiled)(how.get("optimizer", sgd)())
        fit = {**given[how.get("data", "arrays")], "epochs": 2, "verbose": 0}
        told.append(fails(model.fit, **fit, callbacks=make()))
        chosen.exchange = None
    return told


def test_what_cannot_work_is_refused_before_the_first_step(alone):
    [told] = alone.run(refused, timeout=120)
    for (_, _, message), found in zip(FITS, told, strict=True):
        assert found is not None, message
        assert found[0] == "ValueError" and message in found[1], found


def not_under_a_strategy(directory):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    x, y = data()
    callbacks = [
        BroadcastVariables(),
        LearningRateScaling(),
        BatchSizeSchedule([8]),
        Checkpoint(directory),
        ProgressPrinter(),
        CommunicationStats(),
    ]
    with dtk.strategies.undistributed():
        return [fails(model.fit, x, y, verbose=0, callbacks=[callback]) for callback in callbacks]


def test_a_model_no_strategy_compiled_is_refused(alone, tmp_path):
    for kind, text in alone.run(not_under_a_strategy, str(tmp_path))[0]:
        assert kind == "NotDistributedError"
        assert "inside `with strategy.scope():`" in text
