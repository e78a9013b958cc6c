"""When a step's parts are compared with the step: before the first one, and as training goes on.

before the first     `self_test.run`, if something of the step is not Keras's own
before 2, 4, 8       `self_test.audit`
before 16, 32, ...   `self_test.audit`, put off while audits would take more than 1 % of the time
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from dtk.input import slicing
from dtk.trainer.model_state import ModelState
from dtk.trainer.replica import self_test, step_trial
from dtk.trainer.strategy import StepFunction

# The part of the time of all steps, and of no fewer than so many, that audits may take; the first
# ones, which find most mistakes, may take more.
_PART, _STEPS, _FIRST = 0.01, 1000, 3


class StepChecks:
    """The comparisons of a model's train steps, or of its test steps.

    Attributes:
        kinds: Of the step's terms; None until the step has been tried, or found not to need it.
        trial: Of a step that has been tried, and whose parts add up.
        tried_whole: Whether steps that compute all rows of a batch have been tried.
        joined: Whether one worker computes all rows, as parts do not add up; None if not tried.
        steps: Number of steps taken since `compile`.
    """

    def __init__(
        self,
        trainer: ModelState,
        make_trial: Callable[[StepFunction, slicing.Slices], step_trial.Trial],
    ):
        self.kinds: dict[str, str] | None = None
        self.trial: step_trial.Trial | None = None
        self.joined: bool | None = None
        self.tried_whole = False
        self.steps = 0
        self._trainer, self._make_trial = trainer, make_trial
        self._compared = 0  # the last step that was compared
        self._due = 0  # the next one to be
        self._audits = 0
        self._costs = {False: 0.0}  # seconds of the last audit of few rows, and of many
        self._spent = 0.0
        self._trained = (0, 0.0)  # steps since the first audit, and their seconds
        self._since: tuple[int, float] | None = None  # the step and time when the last audit ended

    def try_step(
        self, step_function: StepFunction, first: slicing.Slices, reasons: Sequence[str]
    ) -> None:
        """Compare before the first step, if there are reasons to, or the strategy asks for it."""
        strategy = self._trainer.strategy
        asked = self_test.is_wanted(strategy.self_test)
        group = strategy.model_communicator
        if group.size > 1:  # a stage of a pipeline has layers of its own; all ranks try, or none
            of_ranks = group.allgather_object(reasons)
            reasons = sorted({reason for of_rank in of_ranks for reason in of_rank})
        self.kinds, self.trial = {}, None
        if reasons or asked in (True, "only"):
            trial = self._make_trial(step_function, first)
            verdict = self_test.run(trial, reasons or ["asked for"], first)
            self.kinds = verdict.kinds
            self.joined = self.joined or verdict.joined  # some steps are traced so
            gathered = self._trainer.metrics_of_all_rows
            gathered += [m for m in verdict.gathered if m not in gathered]
            if not verdict.joined:
                step = self.steps + 1
                if trial.take(first, many=True):
                    self_test.audit(trial, verdict.kinds, step)
                self.trial, self._compared, self._due = trial, step, 2 * step
        if asked == "only":
            self_test.end_script()

    def is_due(self) -> bool:
        """Return whether the next step, or one of several in a call, is to be compared again."""
        if self.trial is None or self.kinds is None:
            return False
        return self.steps + self._trainer.model.steps_per_execution >= self._due

    def audit(self, batch: slicing.Slices) -> None:
        """Compare the next step, on other rows than before and today's weights, if time allows it.

        All ranks call it. A batch of another kind than was tried is left to the next `try_step`.
        """
        trial, kinds, step = self.trial, self.kinds, self.steps + 1
        assert trial is not None and kinds is not None
        if not trial.is_of(batch):  # such as with weights of samples, which the step traces anew
            self.kinds = None
            return
        began = time.perf_counter()
        if self._since is not None:
            steps, seconds = self._trained
            last_step, ended = self._since
            self._trained = steps + step - last_step, seconds + began - ended
        # Rank 0 decides, since times differ by rank.
        many, self._due = trial.strategy.world.broadcast_object(self._choose(step, trial))
        if many is not None:
            self._audits += 1
            if trial.take(batch, step, many):  # else replicas have other numbers of rows
                self_test.audit(trial, kinds, step, self._compared)
                self._compared = step
                self._costs[many] = time.perf_counter() - began
            else:  # an epoch's smaller last batch, which 2, 4, 8, ... may meet every time
                self._due = step + 1
        ended = time.perf_counter()
        self._spent += ended - began
        self._since = step, ended

    def _choose(self, step: int, trial: step_trial.Trial) -> tuple[bool | None, int]:
        """Return whether to compare many rows, None for none, and the step to look at next."""
        steps, seconds = self._trained
        part = _PART * seconds / steps if steps else math.inf  # seconds that a step pays
        allowed = part * max(step, _STEPS)
        few = self._costs[False]
        many = self._costs.get(True, few * trial.times_many)
        if self._audits % 3 == 1 and self._spent + many <= allowed:
            return True, 2 * step
        if self._audits < _FIRST or self._spent + few <= allowed:
            return False, 2 * step
        return None, max(step + 1, math.ceil((self._spent + few) / part))
