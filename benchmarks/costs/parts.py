"""Where the time of a step goes: computing, dtk's own ops, waiting for the slowest, sending.

Four steps, of which each has one part more than the one before:

| step | what it has |
|---|---|
| plain | every worker by itself, plain `fit` on its own rows |
| + dtk's ops | the same under dtk, over a communicator that sends nothing |
| + waiting | had each of these waited for the slowest worker's: computed from the same times |
| + sending | `fit` under dtk |
"""

import statistics

import keras
from dtk.bench.report import BOUND
from dtk.bench.variant import Fit, LocalFit
from dtk.communicators.local import NullCommunicator
from dtk.strategies import AllReduceStrategy

import report
from fits import turns, warm
from models import PROBLEMS


def measure(setting, strategy):
    communicator = strategy.communicator
    (device,) = strategy.extended.worker_devices
    variants = [
        LocalFit(PROBLEMS[setting.model], setting, communicator, device),
        together(setting, silent(strategy), "ops"),
        together(setting, strategy, "sending"),
    ]
    warm(variants)
    said = turns(variants, setting.rounds, communicator)
    mine = {name: [turn["steps"] for turn in of_one] for name, of_one in said.items()}
    ranks = communicator.allgather_object(mine)
    own = {name: means([rank[name] for rank in ranks], statistics.mean) for name in mine}
    waiting = means([rank["ops"] for rank in ranks], max)
    steps = [own[BOUND], own["ops"], waiting, own["sending"]]
    added = (
        report.spread(
            [100 * (b - a) / all_ for a, b, all_ in zip(*pair, own["sending"], strict=True)]
        )
        for pair in zip(steps, steps[1:], strict=False)
    )
    header = "model|plain, ms per step|with dtk's ops|with waiting|with sending|"
    header += "dtk's ops, % of a step|waiting, %|sending, %"
    cells = [report.spread(seconds, report.MS) for seconds in steps]
    return report.markdown(header, [[setting.model, *cells, *added]])


def means(ranks, of_ranks):
    """Seconds of a step for each round: steps of all ranks joined, and their mean.

    Args:
        ranks: For each, rounds of steps.
        of_ranks: Makes one step of those that the ranks took at the same place.
    """
    return [
        statistics.mean(map(of_ranks, zip(*rounds, strict=True)))
        for rounds in zip(*ranks, strict=True)
    ]


def together(setting, strategy, name):
    """`fit` of all workers."""
    problem, batch = PROBLEMS[setting.model], setting.batch_size * strategy.size
    x, y = problem.data((setting.steps + 1) * batch)
    with strategy.scope():
        model = problem.compiled(keras)
    data = {"x": x, "y": y, "batch_size": batch}
    return Fit(name, model, data, setting.steps, strategy.communicator)


def silent(strategy):
    """A strategy that sends nothing, and otherwise does what this one does on rank 0."""
    null = NullCommunicator(0, strategy.size)  # what another rank is sent is not there
    null.costs = strategy.communicator.costs  # they size buckets
    return AllReduceStrategy(communicator=null)
