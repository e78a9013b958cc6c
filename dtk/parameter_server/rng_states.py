"""States of random layers while workers compute steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dtk.nests import Array
from dtk.parameter_server.functional_step import FunctionalStep, State
from dtk.parameter_server.scheduler import Schedule, StepSlice
from dtk.trainer.ranks import shared_weights

# Distance between the random states of steps that compute at the same time.
RNG_STRIDE = 1 << 10


class _Begun(NamedTuple):
    """States of random layers, uint32 of shape (layers, 2), and the step that they belong to."""

    states: Array
    first: int

    def at(self, step: int) -> Array:
        """Return the states of an asynchronous step."""
        states = self.states.copy()
        states[:, 1] += np.uint32((step - self.first) * RNG_STRIDE % 2**32)
        return states


class RngStates:
    """States of a model's random layers; every slice of every step derives its own from them.

    The chief keeps the states from the first step until all steps are applied, and then gives them
    back to the model. A serial step goes on where the step before has stopped. Steps that compute
    at the same time each have a separate state, whichever is computed first.
    """

    def __init__(self, variables: Callable[[], list[keras.Variable]]):
        self._variables = variables
        self._draws = False
        self._begun: _Begun | None = None

    def begin(self, schedule: Schedule) -> tf.TensorSpec:
        """Read the model's random states, unless steps are under way; return their spec."""
        if self._begun is None:
            states = [v.numpy() for v in self._variables()]
            self._begun = _Begun(np.array(states, "uint32").reshape(-1, 2), schedule.offered)
        return tf.TensorSpec(self._begun.states.shape, tf.uint32)

    def of(self, piece: StepSlice, schedule: Schedule) -> Array:
        """Return the random states of a slice: the same on every worker, at any time."""
        assert self._begun is not None
        states = self._begun.at(piece.step) if schedule.tau else self._begun.states
        folded = [shared_weights.fold_seed(state, piece.slice) for state in states]
        return np.array(folded, "uint32").reshape(-1, 2)

    def values(self, rng_states: tf.Tensor) -> State:
        """Return the state variables with their values in a traced step."""
        variables = self._variables()
        return list(zip(variables, tf.unstack(rng_states, num=len(variables)), strict=True))

    def left_by(self, traced: FunctionalStep) -> list[tf.Tensor]:
        """Return the states that a traced step leaves."""
        return [traced.value(variable) for variable in self._variables()]

    def note_draws(self, traced: FunctionalStep) -> None:
        """Note whether a traced step draws random numbers."""
        given = {id(variable): value for variable, value in traced.state}
        self._draws |= any(traced.value(v) is not given[id(v)] for v in self._variables())

    def go_on_from(self, states: Sequence[Array]) -> None:
        """Let the next step go on where a serial step has stopped."""
        assert self._begun is not None
        self._begun = self._begun._replace(states=np.array(states, "uint32"))

    def write_back(self, schedule: Schedule) -> None:
        """Give the states back to the model; all steps must be applied."""
        if self._begun is not None and self._draws:
            states = self._begun.at(schedule.offered) if schedule.tau else self._begun.states
            for variable, state in zip(self._variables(), states, strict=True):
                variable.assign(state)
        self.forget()

    def forget(self) -> None:
        """Forget the states of steps that are over, or that an exception left."""
        self._begun = None
