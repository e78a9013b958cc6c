"""Keras optimizers: what dtk reads and sets of them, and what it patches.

An optimizer that wraps another counts as two.

    for good           apply of every optimizer             patch_every_apply
    of one optimizer   apply                                patch_apply
                       scale_loss                           patch_scale_loss
                       check_finite                         patch_check_finite
                       _clip_gradients                      patch_clip
                       build, finalize_variable_values      patch_build
                       finalize_variable_values             patch_finalize
                       save_ and load_own_variables         patch_state
                       attributes that Keras saves          saved_numbers
                       _all_reduce_sum_gradients            own_optimizer
                       update_step                          optimizer_updates.fuse_updates
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf
from keras.src.saving.keras_saveable import KerasSaveable

from dtk.compat.keras_variables import VariablePart, copy_mark, path_of, set_slot_of_part
from dtk.nests import Array, Function, Gradients, Tree
from dtk.patches import patch_around, patch_for_good

_Note = TypeVar("_Note")

_MULTI = getattr(keras.optimizers, "MultiOptimizer", ())

# An optimizer's own `apply`, and its function that clips gradients.
Apply: TypeAlias = Callable[[Gradients, Sequence[keras.Variable] | None], Tree]
Clip: TypeAlias = Callable[[Gradients], Gradients]


def optimizer_owner(optimizer: keras.Optimizer) -> tf.distribute.Strategy:
    """Return the strategy an optimizer was made under."""
    return optimizer._distribution_strategy


def own_optimizer(optimizer: keras.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Make a strategy own an optimizer, which then treats gradients as already reduced."""
    optimizer._distribution_strategy = strategy
    optimizer._all_reduce_sum_gradients = list


def patch_clip(
    optimizer: keras.Optimizer,
    around: Callable[[Gradients, Sequence[keras.Variable], Clip], Gradients],
) -> None:
    """Make an optimizer call `around(gradients, variables, clip)` in place of `clip(gradients)`.

    With gradient accumulation it does so once per window, with the window's sum.
    """
    clip, update = optimizer._clip_gradients, optimizer._backend_apply_gradients
    running = threading.local()  # replicas may be threads

    def updated(grads: Gradients, trainable_variables: Sequence[keras.Variable]) -> Tree:
        running.variables = trainable_variables
        return update(grads, trainable_variables)

    optimizer._backend_apply_gradients = updated
    optimizer._clip_gradients = lambda gradients: around(gradients, running.variables, clip)


def chain(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Return an optimizer and the optimizers it wraps, outermost first."""
    found = [optimizer]
    while hasattr(found[-1], "inner_optimizer"):
        found.append(found[-1].inner_optimizer)
    return found


def is_multi(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer is a `MultiOptimizer`, which divides variables among others."""
    return isinstance(optimizer, _MULTI)


def members(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Return an optimizer and all optimizers inside it, outermost first."""
    found = chain(optimizer)
    for one in found:  # it grows meanwhile
        if is_multi(one):
            found += [inside for member in one.optimizers for inside in chain(member)]
    return found


def steps_of(optimizer: keras.Optimizer) -> keras.Variable:
    """Return the number of an optimizer's steps, those that only accumulate included."""
    return optimizer._iterations


def is_linear(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer does the same with two slices as with their sum."""
    if type(optimizer) is not keras.optimizers.SGD:
        return False
    return not (optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue)


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


def patch_apply(
    optimizer: keras.Optimizer,
    around: Callable[[Gradients, Sequence[keras.Variable] | None, Apply], Tree],
) -> Apply:
    """Make `apply` call `around(gradients, variables, apply)`; return the old `apply`."""
    apply = optimizer.apply

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(apply)
    def applied(
        grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> Tree:
        return around(list(grads), trainable_variables, apply)

    optimizer.apply = applied
    return apply


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


def patch_scale_loss(optimizer: keras.Optimizer, change: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """Make an optimizer change losses before it scales them."""
    scale_loss = optimizer.scale_loss

    @functools.wraps(scale_loss)
    def changed(loss: tf.Tensor) -> tf.Tensor:
        return scale_loss(change(loss))

    optimizer.scale_loss = changed


def patch_check_finite(
    optimizer: keras.optimizers.LossScaleOptimizer, change: Callable[[tf.Tensor], tf.Tensor]
) -> None:
    """Make an optimizer that scales losses decide differently whether gradients are finite."""
    check_finite = optimizer.check_finite
    optimizer.check_finite = lambda grads: change(check_finite(grads))


def patch_build(
    optimizer: keras.Optimizer,
    expand: Callable[[Sequence[keras.Variable]], list[keras.Variable]],
    built: Callable[[Sequence[keras.Variable]], None],
) -> None:
    """Make an optimizer hold expanded variables in place of the variables it is built for.

    Slots that are built get the mark of their variable.
    """
    build, finalize = optimizer.build, optimizer.finalize_variable_values

    def build_expanded(variables: Sequence[keras.Variable]) -> None:
        add = {"add_variable_from_reference": _marked_slot}
        with patch_around(keras.optimizers.Optimizer, **add):
            build(expand(variables))
        built(variables)

    optimizer.build = build_expanded
    optimizer.finalize_variable_values = lambda variables: finalize(expand(variables))


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


def patch_finalize(
    optimizer: keras.Optimizer, around: Callable[[Callable[[], Tree]], Tree]
) -> None:
    """Make an optimizer call `around(finalize)` to set the last values of its variables."""
    finalize = optimizer.finalize_variable_values
    optimizer.finalize_variable_values = lambda variables: around(lambda: finalize(variables))


def patch_state(
    optimizer: keras.Optimizer,
    save: Callable[[dict[str, Array]], None],
    load: Callable[[dict[str, Array], Callable[[dict[str, Array]], None]], None],
) -> None:
    """Make an optimizer call `save(store)` and `load(store, load)` for its own variables."""
    own_load = optimizer.load_own_variables
    optimizer.save_own_variables = save
    optimizer.load_own_variables = lambda store: load(store, own_load)


def exclude_parts(optimizer: keras.Optimizer, parts: Iterable[VariablePart]) -> None:
    """Exclude the parts of variables that are excluded from weight decay."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay", None)
    if excluded:
        key = optimizer._var_key
        excluded.update([key(part) for part in parts if key(part.whole) in excluded])


def is_between_windows(optimizer: keras.Optimizer) -> tf.Tensor:
    """Return whether no accumulation window is open."""
    return tf.equal(optimizer._iterations % optimizer.gradient_accumulation_steps, 0)


def note_of(optimizer: keras.Optimizer, kind: type[_Note]) -> _Note | None:
    """Return the note that `set_note` has set on an optimizer, or None."""
    note = getattr(optimizer, "_dtk_note", None)
    return note if isinstance(note, kind) else None


def set_note(optimizer: keras.Optimizer, note: object) -> None:
    """Set a note on an optimizer; the note lives as long as the optimizer."""
    optimizer._dtk_note = note


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
