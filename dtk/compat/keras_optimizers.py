"""Keras optimizers: what dtk reads and sets of them, and what it replaces.

An optimizer that wraps another counts as two.

    for good           apply of every optimizer             patch_every_apply
    of one optimizer   methods, by a class made for it      made_classes
                       methods with private names           TakenOver
                       attributes that Keras saves          saved_numbers
                       update_step                          optimizer_updates.fuse_updates
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras.src.saving.keras_saveable import KerasSaveable

from dtk.compat.keras_variables import VariablePart, copy_mark, path_of, set_slot_of_part
from dtk.compat.tf_replicas import running
from dtk.nests import Array, Function, Gradients, Tree
from dtk.patches import patch_around, patch_for_good, temporarily

_MULTI = getattr(keras.optimizers, "MultiOptimizer", ())

# An optimizer's `apply`.
Apply: TypeAlias = Callable[[Gradients, Sequence[keras.Variable] | None], Tree]


def optimizer_owner(optimizer: keras.Optimizer) -> tf.distribute.Strategy:
    """Return the strategy an optimizer was made under, or that has taken it over."""
    return optimizer._distribution_strategy


def set_owner(optimizer: keras.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Make a strategy own an optimizer."""
    optimizer._distribution_strategy = strategy


class TakenOver(keras.Optimizer):
    """An optimizer of which a strategy replaces methods; see `made_classes`.

    It treats gradients as already reduced.
    """

    def _dtk_clip(self, gradients: Gradients, variables: Sequence[keras.Variable]) -> Gradients:
        """Clip the gradients of variables; with accumulation, once per window."""
        del variables
        return super()._clip_gradients(gradients)

    def _clip_gradients(self, gradients: Gradients) -> Gradients:
        return self._dtk_clip(gradients, running.applied)

    def _backend_apply_gradients(
        self, grads: Gradients, trainable_variables: Sequence[keras.Variable]
    ) -> None:
        with temporarily(running, applied=trainable_variables):
            super()._backend_apply_gradients(grads, trainable_variables)

    def _all_reduce_sum_gradients(self, grads_and_vars: Iterable[Tree]) -> list[Tree]:
        return list(grads_and_vars)


def chain(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Return an optimizer and the optimizers it wraps, outermost first."""
    optimizers = [optimizer]
    while hasattr(optimizers[-1], "inner_optimizer"):
        optimizers.append(optimizers[-1].inner_optimizer)
    return optimizers


def is_multi(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer is a `MultiOptimizer`, which divides variables among others."""
    return isinstance(optimizer, _MULTI)


def members(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Return an optimizer and all optimizers inside it, outermost first."""
    optimizers = chain(optimizer)
    for one in optimizers:  # it grows meanwhile
        if is_multi(one):
            optimizers += [inside for member in one.optimizers for inside in chain(member)]
    return optimizers


def steps_of(optimizer: keras.Optimizer) -> keras.Variable:
    """Return the number of an optimizer's steps, those that only accumulate included."""
    return optimizer._iterations


def is_linear(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer does the same with two slices as with their sum."""
    if optimizer.__class__ is not keras.optimizers.SGD or has_own(optimizer, "update_step"):
        return False
    return not (optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue)


def has_own(optimizer: keras.Optimizer, name: str) -> bool:
    """Return whether a method of an optimizer is a script's: of its class, or set on the object."""
    holders = [optimizer, *type(optimizer).__mro__]
    return not all(_is_known(vars(one)[name]) for one in holders if name in vars(one))


# The methods that Keras calls with all gradients or variables: each step's, and a window's.
_OF_STEPS = ("apply", "_backend_apply_gradients")
_OF_WINDOWS = ("_clip_gradients", "_apply_weight_decay", "_backend_update_step")


def own_methods(optimizer: keras.Optimizer, outermost: bool, of_steps: bool = False) -> list[str]:
    """Return a script's methods that take all gradients or variables of a step or a window.

    Args:
        optimizer: It may be inside another one.
        outermost: Whether it is inside no other, where Keras calls `apply` only.
        of_steps: Whether to leave out those that take a window's sums.
    """
    names = ("apply_gradients",) * outermost + _OF_STEPS + (() if of_steps else _OF_WINDOWS)
    return [name for name in names if has_own(optimizer, name)]


def _is_known(method: object) -> bool:
    """Return whether a method, and what it wraps, is Keras's or dtk's."""
    # By the globals of its code: functools.wraps gives a script's function the module of Keras's.
    variables = getattr(method, "__globals__", {"__name__": getattr(method, "__module__", "")})
    known = str(variables["__name__"]).partition(".")[0] in ("dtk", "keras", "tensorflow")
    return known and (not hasattr(method, "__wrapped__") or _is_known(method.__wrapped__))


def own_variables(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return an optimizer's variables without the variables of an optimizer it wraps."""
    inner = getattr(optimizer, "inner_optimizer", None)
    others = {id(v) for v in inner.variables} if inner is not None else set()
    return [v for v in optimizer.variables if id(v) not in others]


def slots_by_variable(
    optimizer: keras.Optimizer,
) -> list[tuple[keras.Variable, keras.Variable, str]]:
    """Return (slot variable, trained variable, start of the slot's name) of an optimizer."""
    trained = sorted(optimizer._trainable_variables, key=lambda v: -len(path_of(v)))
    named = [(path_of(v).replace("/", "_") + "_", v) for v in trained]
    return [
        next((slot, v, start) for start, v in named if slot.name.startswith(start))
        for slot in own_variables(optimizer)
        if slot.name.startswith(tuple(start for start, _ in named))
    ]


def patch_every_apply(
    check: Callable[[keras.Optimizer, Sequence[keras.Variable]], Apply | None],
) -> None:
    """Make every optimizer call `check(optimizer, variables)` before it applies, from now on.

    If that returns a function, it applies the gradients instead.
    """

    @tf.autograph.experimental.do_not_convert
    def apply(
        optimizer: keras.Optimizer,
        grads: Gradients,
        trainable_variables: Sequence[keras.Variable] | None = None,
        *,
        original: Function[Tree],
    ) -> Tree:
        instead = check(optimizer, trainable_variables or [])
        if instead is not None:
            return instead(grads, trainable_variables)
        return original(optimizer, grads, trainable_variables)

    # LossScaleOptimizer builds the optimizer it wraps before that one's `apply` is called.
    for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        patch_for_good(kind, "apply", apply)


def marking_slots() -> contextlib.AbstractContextManager[None]:
    """Return a context in which slots that optimizers build get the mark of their variable."""
    return patch_around(keras.optimizers.Optimizer, add_variable_from_reference=_marked_slot)


def _marked_slot(
    optimizer: keras.Optimizer,
    reference_variable: keras.Variable,
    *args: object,
    original: Function[keras.Variable],
    **kwargs: object,
) -> keras.Variable:
    slot = original(optimizer, reference_variable, *args, **kwargs)
    copy_mark(reference_variable, slot)
    if isinstance(reference_variable, VariablePart):
        set_slot_of_part(slot, reference_variable, str(args[0] if args else kwargs.get("name")))
    return slot


def exclude_parts(optimizer: keras.Optimizer, parts: Iterable[VariablePart]) -> None:
    """Exclude the parts of variables that are excluded from weight decay."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay", None)
    if excluded:
        key = optimizer._var_key
        excluded.update([key(part) for part in parts if key(part.whole) in excluded])


def is_between_windows(optimizer: keras.Optimizer) -> tf.Tensor:
    """Return whether no accumulation window is open."""
    return tf.equal(optimizer._iterations % optimizer.gradient_accumulation_steps, 0)


# The name of an optimizer's count of steps among its saved numbers.
_STEPS = "steps"


class SavedNumbers(KerasSaveable):
    """Numbers of an optimizer that Keras saves and loads beside its variables.

    Files that have them are read without dtk as well. They belong to the variables of so many
    steps: where those were not loaded, these are not.
    """

    def __init__(self, optimizer: keras.Optimizer):
        self.numbers: dict[str, Mapping[str, float]] = {}
        # A closure: Keras looks for what to save in the attributes.
        self._steps = lambda: int(keras.ops.convert_to_numpy(optimizer.iterations))

    def _obj_type(self) -> str:
        return "Loss"  # of the kinds that Keras knows, one with few attributes

    def save_own_variables(self, store: dict[str, Array]) -> None:
        """Write all numbers into what Keras saves."""
        store[_STEPS] = np.array(self._steps())
        for name, numbers in self.numbers.items():
            for key, number in numbers.items():
                store[f"{name}.{key}"] = np.array(number, "float64")

    def load_own_variables(self, store: Mapping[str, Array]) -> None:
        """Take the numbers of a file, none if it has none."""
        if _STEPS not in store or int(store[_STEPS]) != self._steps():
            return
        self.numbers = {}
        for path in store.keys():  # noqa: SIM118, a store of Keras is no mapping
            name, _, key = path.partition(".")
            if key:
                self.numbers[name] = {**self.numbers.get(name, {}), key: float(store[path])}


def saved_numbers(optimizer: keras.Optimizer) -> SavedNumbers:
    """Return the numbers that are saved with an optimizer, as an attribute of it."""
    if not hasattr(optimizer, "_dtk_numbers"):
        optimizer._dtk_numbers = SavedNumbers(optimizer)
    return optimizer._dtk_numbers


def trained_variables(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return the Keras variables an optimizer was built for."""
    return optimizer._trainable_variables


def accumulated(optimizer: keras.Optimizer) -> list[keras.Variable | None]:
    """Return an optimizer's variables for the sums of an accumulation window."""
    return list(getattr(optimizer, "_accumulated_gradients", []))


def given_rate(optimizer: keras.Optimizer) -> Callable[[], tf.Tensor] | None:
    """Return the schedule or function of an optimizer's learning rate, if it has one."""
    rate = optimizer._learning_rate
    return rate if callable(rate) and not isinstance(rate, keras.Variable) else None


def is_replaced(variable: keras.Variable) -> bool:
    """Return whether an optimizer replaces a variable by its gradient.

    Keras's float8 layers have it do this for their scales and for the largest values they have
    seen.
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


def takes_adamw(muon: keras.Optimizer, variable: keras.Variable) -> bool:
    """Return whether a `keras.optimizers.Muon` updates a variable as AdamW does."""
    return muon._should_use_adamw(variable)


def index_variables(optimizer: keras.Optimizer) -> None:
    """Rebuild an optimizer's index of its variables after their storage has moved."""
    keys = [optimizer._var_key(v) for v in optimizer._trainable_variables]
    optimizer._trainable_variables_indices = {key: i for i, key in enumerate(keys)}
    decays = getattr(optimizer, "_weight_decay_by_var_key", None)
    if decays:  # built in the order of the variables
        optimizer._weight_decay_by_var_key = dict(zip(keys, decays.values(), strict=True))
    if is_multi(optimizer):
        optimizer._var_to_optimizer_idx = {
            optimizer._var_key(v): i
            for i, member in enumerate(optimizer.optimizers)
            for v in member._trainable_variables
        }
