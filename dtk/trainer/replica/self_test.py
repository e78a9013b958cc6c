"""Test that a step's parts add up to the step: compute a few rows by one replica, and by all.

A step must be made of means or sums over rows, or the parts of several replicas do not add up to
the result of one process. Nearly all of Keras's losses, metrics and layers add up. The others and a
script's own are tried before the first update: a few rows of the first batch go through the step as
a whole and as the parts of all replicas. Nothing is applied, and every variable gets its old value
back.

    terms        show which losses are sums or ratios, to be counted as such (see `loss_terms`)
    losses       whose graph does not show sums over rows, or whose parts differ, are computed on
                 the rows of all replicas (see `whole_batch`)
    gradients    must agree, or NotDistributedError; for slices, which optimizers such as Adam
                 square one by one, the sums of their squares must agree, too
    state        that a step assigns must agree, or NotDistributedError
    logs         metric results, other numbers, and tensors that do not agree give a warning

Later steps are compared again, see `audit`. During the test random numbers belong to rows
(`compat.random_draws`), and batch normalization uses all rows, synchronized or not: neither is a
mistake of the script. Nor is a kink, see `_judge`.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

import keras
import numpy as np
import tensorflow as tf

from dtk.cluster.variables import SELF_TEST, TIME_STEPS
from dtk.compat import (
    keras_models,
    random_draws,
)
from dtk.errors import NotDistributedError, at_rank
from dtk.input import slicing
from dtk.trainer.replica import metric_trial
from dtk.trainer.replica.comparing import Difference, compare, kinds_of, notes_of, tolerance_of
from dtk.trainer.replica.step_trial import Outcome, Trial
from dtk.trainer.replica.trial_reasons import ALONG, PADDING, of_predict
from dtk.trainer.strategy import Strategy, tell
from dtk.trainer.tracing import traced_step
from dtk.trainer.tracing.loss_terms import BATCH, SUM

# Number of other weights at which a step is tried before it is refused.
_OTHER_WEIGHTS = 3
# Up to this number of draws, every combination of layouts is tried.
_DRAWS = 4
_LARGE = 1e6
# Bytes of outputs and targets that are gathered for a loss in each step; more are refused.
MOST_GATHERED = 256 << 20

# What is done about steps that do not add up, where one worker may have all rows.
JOINED = (
    "One worker computes all rows of each step, as one process does, and the others wait; "
    "dtk.strategies.AllReduceStrategy() shares the rows"
)
_ALONG_BATCH = (
    "A layer along axis 0 needs the rows of all workers. In place of it, call a layer of your own "
    "whose call(self, x) is: rows, first = dtk.layers.gather_over_batch(x); "
    "return self.layer(rows)[first : first + keras.ops.shape(x)[0]]"
)
_PADDING_ROWS = (
    "TextVectorization pads the rows of each worker to the longest of them, and not of the batch: "
    "give it output_sequence_length=, or call it in the dataset, "
    "dataset.batch(...).map(lambda x, y: (vectorize(x), y))"
)
_MOVING = (
    "The step itself moves weights, by gradients of a replica's own rows; average them first, with "
    "sums = dtk.layers.sum_over_batch and rows = tf.cast(tf.shape(x)[0], tf.float32), for data x: "
    "gradients = [sums(g * rows) / sums(rows) for g in gradients]"
)
_CLIPPING = (
    "Does the step clip gradients before an optimizer takes them? Give the optimizer clipnorm=, "
    "global_clipnorm= or clipvalue=, which clip those of the whole batch"
)


class Verdict(NamedTuple):
    """Result of comparing a step on a few rows as a whole and in parts."""

    kinds: dict[str, str]  # kinds of the terms that are not means
    difference: Difference
    notes: list[str]  # which logged numbers would differ
    # metrics to count on the gathered rows of all replicas
    gathered: Sequence[keras.Metric] = ()
    joined: bool = False  # whether all rows of a step must be computed in one place


def is_wanted(asked: bool | str) -> bool | str:
    """Return a strategy's `self_test`, or the environment's value, after checking it."""
    said = os.environ.get(SELF_TEST, "")
    if said:
        asked = {"0": False, "1": True}.get(said, said)
    if asked not in (True, False, "auto", "only"):
        raise ValueError(f"self_test={asked!r}; expected True, False or 'auto' ({SELF_TEST}: 1, 0)")
    return asked


def fail_if_nothing_is_trained() -> None:
    """Under `dtk check` and `dtk tune`, make a script that trains no model end in an error."""
    if os.environ.get(SELF_TEST) == "only":
        atexit.register(_nothing_was_trained, "dtk check")
    if TIME_STEPS in os.environ:
        atexit.register(_nothing_was_trained, "dtk tune")


def end_script() -> NoReturn:
    """End a script under `dtk check` or `dtk tune`, once it has what it wants."""
    atexit.unregister(_nothing_was_trained)
    raise SystemExit(0)


def _nothing_was_trained(command: str) -> None:
    print(f"{command}: the script ended without training a model", file=sys.stderr, flush=True)
    os._exit(1)


def run(trial: Trial, reasons: Sequence[str], batch: slicing.Slices | None = None) -> Verdict:
    """Compute a few rows as a whole and in parts, and compare. All ranks call it together.

    Of a batch that is given, more rows are taken if so few give no number, as a mean over pairs.
    """
    began = time.perf_counter()
    strategy, model = trial.strategy, trial.model
    name = trial.step_function.__name__
    with _explaining_failures(name, model, trial.rows, strategy):
        verdict = _judge(trial, _compute)
        agreed = strategy.world.broadcast_object
        numberless = verdict.difference.wrong and not agreed(_has_numbers(trial.whole()))
        if batch and numberless and trial.take(batch, many=True):
            verdict = _judge(trial, _compute)
    if verdict.difference.wrong:
        verdict = _with_cure(verdict, trial)
        large = [name for name, size in trial.losses.items() if size > MOST_GATHERED]
        if large:
            sizes = ", ".join(f"{name}: {_amount(trial.losses[name])}" for name in large)
            too_large = (
                f"Outputs and targets are gathered up to {_amount(MOST_GATHERED)} a step ({sizes})"
            )
            cure = f"{too_large}. {verdict.difference.cure}"
            verdict = verdict._replace(difference=verdict.difference._replace(cure=cure))
        mistake = (
            f"the {name} of model {model.name!r} (tried because of "
            f"{', '.join(reasons)}) does not add up over {len(trial.parts)} "
            f"replicas: {trial.rows} rows computed by one, and as parts of {[*trial.parts]} rows: "
            f"{verdict.difference.wrong}"
        )
        if trial.may_join:
            tell(strategy, f"warning: {mistake}. {JOINED}")
            return verdict._replace(joined=True)
        message = (
            f"{mistake}. {verdict.difference.cure}. Nothing was updated. "
            "self_test=False (or DTK_SELF_TEST=0) trains on what the replicas' parts add up to"
        )
        raise NotDistributedError(at_rank(strategy.rank, message))
    verdict = _with_counts(trial, verdict)
    for note in verdict.notes:
        tell(strategy, f"warning: model {model.name!r}: {note}")
    for loss in (loss for loss, kind in verdict.kinds.items() if kind == BATCH):
        tell(
            strategy,
            f"model {model.name!r}: {loss} is of the whole batch: {_amount(trial.losses[loss])} "
            "of outputs and targets are gathered in each step, and every worker computes it as "
            "one process does",
        )
    if strategy.is_chief:
        kinds = {term: kind for term, kind in verdict.kinds.items() if kind != BATCH}
        details = "".join(f"; {term} is a {kind}" for term, kind in kinds.items())
        if name == "train_step" and not verdict.difference.moves:
            details += "; all gradients are zero, which shows nothing: later steps are tried again"
        print(
            f"dtk: self-test of model {model.name!r} ({', '.join(reasons)}): {trial.rows} rows as "
            f"a whole and in {len(trial.parts)} parts agree to "
            f"{verdict.difference.size:.0e}{details} ({time.perf_counter() - began:.1f} s)"
        )
    return verdict


def _with_cure(verdict: Verdict, trial: Trial) -> Verdict:
    """Say what to change, where a part of the step is known not to add up."""
    cures = [_MOVING] if trial.moves_weights else []
    for reason in of_predict(trial.model):
        cures += [_ALONG_BATCH] if reason.endswith(ALONG) else []
        cures += [_PADDING_ROWS] if reason.endswith(PADDING) else []
    cure = (cures or [verdict.difference.cure])[-1]
    return verdict._replace(difference=verdict.difference._replace(cure=cure))


def audit(trial: Trial, kinds: dict[str, str], step: int, before: int = 0) -> None:
    """Compare a step's parts with the whole, before it is applied. All ranks call it.

    A term may begin late, and rows differ: what added up need not do so for ever.

    Args:
        trial: Of the step's rows.
        kinds: Of its terms, as they were found.
        step: Its number, from 1.
        before: The number of the last step that was compared; 0 for this one, on fewer rows.
    """
    model, name = trial.model, trial.step_function.__name__

    def compute(trial: Trial) -> Verdict:
        return _confirm(trial, kinds)

    verdict = trial.strategy.world.broadcast_object(compute(trial))
    if verdict.difference.wrong:
        verdict = _at_other_weights(trial, verdict, compute)
    if verdict.difference.wrong:
        verdict = _with_cure(verdict, trial)
        since = f"; steps since {before} may be wrong" if before not in (0, step - 1) else ""
        message = (
            f"step {step} of the {name} of model {model.name!r} does not add up over "
            f"{len(trial.parts)} replicas, and {f'step {before}' if before else 'fewer rows'} did: "
            f"{trial.rows} rows computed by one, and as parts of {[*trial.parts]} rows: "
            f"{verdict.difference.wrong}. {verdict.difference.cure}. "
            f"The step was not applied{since}. "
            "self_test=False (or DTK_SELF_TEST=0) trains on what the replicas' parts add up to"
        )
        raise NotDistributedError(at_rank(trial.strategy.rank, message))
    for note in verdict.notes:
        tell(trial.strategy, f"warning: step {step} of model {model.name!r}: {note}")


def _has_numbers(whole: Outcome) -> bool:
    """Whether one process would compute gradients that are numbers."""
    return all(np.isfinite(gradient).all() for gradient in whole.gradients.values())


def _confirm(trial: Trial, kinds: dict[str, str]) -> Verdict:
    """Compute both ways with kinds that are known; logs have counted other steps by now."""
    whole, parts = trial.whole(), trial.replicas(kinds)
    # What begins later is far above rounding, which trained weights may amplify.
    tolerance = min(10 * tolerance_of(trial.model), 5e-2)
    if not _has_numbers(whole):
        return Verdict(kinds, Difference(0.0), [])  # so are one process's
    return Verdict(kinds, compare(whole, parts, tolerance), [])


def _judge(trial: Trial, compute: Callable[[Trial], Verdict]) -> Verdict:
    """Compute both ways until they agree: with each layout of random numbers, at other weights.

    At a kink, such as a ReLU's, rounding decides which gradient is computed. That happens at some
    weights only; a wrong step is wrong at all weights.
    """
    # All ranks follow rank 0's verdict, since rounding may differ by rank.
    agreed = trial.strategy.world.broadcast_object
    best, layouts = agreed(compute(trial)), trial.layouts
    trial.of_python = trial.of_python or bool(best.difference.wrong)
    for others in _layouts(trial.draws) if best.difference.wrong else ():
        trial.layouts = others
        verdict = agreed(compute(trial))
        if not (best.difference.size <= verdict.difference.size):
            best, layouts = verdict, others
        if not best.difference.wrong:
            break
    trial.layouts = layouts
    return _at_other_weights(trial, best, compute) if best.difference.wrong else best


def _at_other_weights(
    trial: Trial, verdict: Verdict, compute: Callable[[Trial], Verdict]
) -> Verdict:
    """Compute both ways at other weights until they agree; else tell rounding from a mistake."""
    far: list[Verdict] = []
    for seed in range(1, 1 + _OTHER_WEIGHTS):
        with trial.moved(seed):
            far.append(trial.strategy.world.broadcast_object(compute(trial)))
        if not far[-1].difference.wrong:
            return far[-1]
    return _undecided(trial, verdict, far)


def _layouts(draws: Sequence[int]) -> Iterator[dict[int, str]]:
    """Yield layouts: every combination; with many draws, one layout for all of them."""
    if len(draws) > _DRAWS:
        yield from (dict.fromkeys(draws, one) for one in random_draws.LAYOUTS)
        return
    for one in itertools.product(random_draws.LAYOUTS, repeat=len(draws)):
        yield dict(zip(draws, one, strict=True))


def _undecided(trial: Trial, verdict: Verdict, far: Sequence[Verdict]) -> Verdict:
    """Warn instead, if the difference may be rounding at these weights and at most others."""
    spread = _spread(trial)
    if not _may_be_rounding(trial, verdict, spread):
        return verdict
    # Rounding may hide a mistake at some weights, and a kink may stand out at others.
    explained, needed = 0, len(far) // 2 + 1
    for seed, other in enumerate(far, 1):
        if explained < needed:
            with trial.moved(seed):
                explained += _may_be_rounding(trial, other, _spread(trial))
    if explained < needed:
        return verdict
    note = (
        f"the self-test cannot tell rounding from a mistake: {verdict.difference.wrong} between "
        f"all rows and the parts, and by {100 * spread:.3g} % if weights change by "
        f"{tolerance_of(trial.model) / 100:.0e} of their size. If the losses are means or sums "
        "over rows, the difference is rounding; self_test=False (or DTK_SELF_TEST=0) then skips "
        "this test"
    )
    return verdict._replace(difference=Difference(verdict.difference.size), notes=[note])


def _spread(trial: Trial) -> float:
    """Return how much changes of the size of rounding make the step differ from itself."""
    tolerance = tolerance_of(trial.model)
    whole, spread = trial.whole(), 0.0
    for seed in (1, 2):
        with trial.moved(seed, tolerance / 100):
            spread = max(spread, compare(whole, trial.whole(), tolerance).size)
    return trial.strategy.world.broadcast_object(spread)


def _may_be_rounding(trial: Trial, verdict: Verdict, spread: float) -> bool:
    return tolerance_of(trial.model) < verdict.difference.size <= 3 * spread < np.inf


def _compute(trial: Trial) -> Verdict:
    """Compute both ways; the losses that do not add up, on the rows of all replicas."""
    whole = trial.whole()
    agreed = trial.strategy.world.broadcast_object
    fitting = [name for name, size in trial.losses.items() if size <= MOST_GATHERED]
    doubtful = agreed(trial.doubtful)
    if large := [name for name in doubtful if name not in fitting]:
        wrong = f"{large[0]} is not made of means or sums over rows, as its graph shows"
        return Verdict({}, Difference(np.nan, wrong), [])
    # If the graph leaves a doubt, or the parts differ. A script's loss may read more than its
    # arguments; then it is what it adds up to.
    ways = [*dict.fromkeys(map(tuple, (doubtful, agreed(fitting), ())))]
    first = verdict = _compute_parts(trial, whole, dict.fromkeys(ways.pop(0), BATCH))
    while verdict.difference.wrong and ways:
        verdict = _compute_parts(trial, whole, dict.fromkeys(ways.pop(0), BATCH))
    return first if verdict.difference.wrong else verdict


def _compute_parts(trial: Trial, whole: Outcome, batch: dict[str, str]) -> Verdict:
    """Compute the parts, then again with the kinds that were found, and compare."""
    # As the graph shows, in the hope that values agree: to trace parts anew takes as long.
    agreed = trial.strategy.world.broadcast_object
    guess = dict.fromkeys(agreed(sorted(trial.sums)), SUM) | batch
    parts = trial.replicas(guess)
    shares = np.array(trial.parts) / trial.rows
    tolerance = tolerance_of(trial.model)
    # Losses of the whole batch, and those within them, have no terms in the parts.
    terms = {name: t for name, t in whole.terms.items() if name in parts.terms or not batch}
    found_kinds = kinds_of(whole._replace(terms=terms), parts, shares, tolerance, trial.sums)
    kinds, unclear, odd = agreed(found_kinds)
    kinds |= batch
    if kinds != guess:
        parts = trial.replicas(kinds)
    difference = agreed(compare(whole, parts, tolerance))
    if difference.wrong and unclear:
        with_sums = kinds | dict.fromkeys(unclear, SUM)
        again = trial.replicas(with_sums)
        of_sums = agreed(compare(whole, again, tolerance))
        if not of_sums.wrong:
            kinds, parts, difference = with_sums, again, of_sums
    if difference.wrong and odd:
        difference = difference._replace(wrong="; ".join([difference.wrong, *odd]))
    own = traced_step.takes_own_step(trial.step_function, trial.model)
    if not difference.wrong and trial.step_function.__name__ == "train_step" and not own:
        difference = agreed(_compare_magnified(trial, kinds, tolerance, difference))
    return Verdict(kinds, difference, notes_of(whole, parts, tolerance))


def _compare_magnified(
    trial: Trial, kinds: Mapping[str, str], tolerance: float, difference: Difference
) -> Difference:
    """Compare with large gradients: a step may clip, which the first batch need not show."""
    with trial.magnified(_LARGE):
        whole, parts = trial.whole(), trial.replicas(kinds)
    finite = [np.isfinite(g).all() for g in [*whole.gradients.values(), *parts.gradients.values()]]
    # Of a mean of gradients that the step keeps, rounding is as large.
    large = compare(whole._replace(state={}), parts, tolerance)
    if not large.wrong or not all(finite):
        return difference
    wrong = f"with gradients {_LARGE:,.0f} times as large, {large.wrong}"
    return Difference(large.size, wrong, _CLIPPING)


def _amount(size: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _with_counts(trial: Trial, verdict: Verdict) -> Verdict:
    """Add notes on metrics that do not add up, and the metrics to count on gathered rows."""
    strategy, model = trial.strategy, trial.model
    doubts: list[metric_trial.Doubt] = []
    if strategy.is_chief:  # one rank decides, since rounding may differ by rank
        served = trial.may_join
        counting = metric_trial.Counting(model, verdict.kinds, tolerance_of(model), served)
        doubts = metric_trial.doubts_of(trial.counted, trial.rows, counting)
    gathers = [one for one in doubts if trial.gathers and one.is_curable]
    cured = doubts if trial.may_join else gathers
    names = strategy.world.broadcast_object([doubt.metric.name for doubt in cured])
    gathered = [m for m in keras_models.foreign_metrics(model) if m.name in names]
    # Logs name a metric so, or by its output before.
    outputs = ["", *(f"{name}_" for name in getattr(model, "output_names", None) or ())]
    said_better = tuple(repr(before + d.metric.name) for d in doubts for before in outputs)
    notes = [note for note in verdict.notes if not note.startswith(said_better)]
    counts = "the chief" if trial.may_join else "one worker"
    notes += [doubt.told(doubt in cured, counts) for doubt in doubts]
    return verdict._replace(notes=notes, gathered=gathered)


# Models made for a fixed number of rows: a worker has only its share of the rows.

# Words in TensorFlow's errors about shapes that do not match.
_OF_SHAPES = re.compile(r"shape|size|dimension|broadcast", re.IGNORECASE)


def check_stateful(model: keras.Model, rows: int | None, strategy: Strategy) -> None:
    """Refuse layers that keep a state for every row from one batch to the next."""
    size = strategy.num_replicas_in_sync
    stateful = [x for x in keras_models.layers_of(model) if getattr(x, "stateful", False)]
    if size == 1 or not stateful:
        return
    layer = stateful[0]
    batch = "a batch" if rows is None else f"a batch of {rows}"
    message = (
        f"layer {layer.name!r} of model {model.name!r} has stateful=True: it keeps a state for "
        f"every row of {batch}, and each of {size} replicas computes a part of the rows. Make "
        f"it `keras.layers.{type(layer).__name__}(..., stateful=False)`, or train on one "
        "process, where it works as without dtk"
    )
    raise NotDistributedError(at_rank(strategy.rank, message))


@contextlib.contextmanager
def _explaining_failures(
    name: str, model: keras.Model, rows: int, strategy: Strategy
) -> Iterator[None]:
    """Return a context for a step tried on a few rows, which says what to do if the step fails.

    After an error about shapes, the model may be made for one batch size. Any other error is raised
    unchanged, since one process would raise it, too: labels that are out of range, for example.
    """
    try:
        yield
    except ValueError as error:
        if type(error).__name__ != "InaccessibleTensorError":
            raise
        message = (
            f"the {name} of model {model.name!r} applies gradients in a branch or a loop of the "
            "graph (tf.cond, tf.while_loop, an `if` on a tensor), where the test of its parts "
            "cannot see them. To accumulate gradients, give the optimizer "
            "gradient_accumulation_steps=; else call apply in the step itself, or train untested, "
            "with self_test=False (or DTK_SELF_TEST=0)"
        )
        raise NotDistributedError(at_rank(strategy.rank, message)) from error
    except tf.errors.InvalidArgumentError as error:
        said, _, node = error.message.partition("[[")
        # Before it may stand where the op was made.
        said = re.sub(r"\{\{.*?\}\}", "", said).strip().rpartition("\n\n")[2]
        if not _OF_SHAPES.search(said):
            tried = f"the {name} of model {model.name!r} was tried on {rows} rows"
            error.add_note(at_rank(strategy.rank, tried))
            raise
        at = re.search(r"node ([^}]+)", node)
        advice = (
            "If the step takes a batch apart by its first axis, such as data[0] and data[1], let "
            "the dataset give a tuple of arrays instead: workers share the rows of that axis"
            if said.startswith("slice index")
            else "If the model is made for one size of batch, of which a worker computes only a "
            "part, write -1 or keras.ops.shape(x)[0] where that size stands"
        )
        message = (
            f"{said}{f' (in {at[1]})' if at else ''}: the {name} of model {model.name!r} "
            f"failed on {rows} rows. {advice}"
        )
        raise NotDistributedError(at_rank(strategy.rank, message)) from error
