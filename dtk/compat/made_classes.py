"""Classes made for one object of Keras's, of which a strategy replaces methods."""

from __future__ import annotations

import types
from collections.abc import Mapping

import keras

from dtk.nests import Function
from dtk.patches import definer


def make_subclass(instance: keras.Model, kind: type[keras.Model]) -> None:
    """Give an object of Keras's a class made for it: a subclass of a kind, and of its own class.

    `instance.__class__` stays the class that the script made it of, under whose name Keras saves
    it; so files, copies and pickles are of that class, and need no dtk. `type(instance)` differs.

    Args:
        instance: An object of Keras's.
        kind: A class of dtk, whose methods come before the object's own. Of Keras's classes it may
            only have those before it that the object has.
    """
    original, current = instance.__class__, type(instance)
    # What a script has set on the object would hide the kind's methods, which call it instead.
    own_classes = [one for one in kind.__mro__ if one.__module__.startswith("dtk.")]
    replaced = {name for one in own_classes for name in vars(one)}
    own = {n: staticmethod(vars(instance).pop(n)) for n in replaced & vars(instance).keys()}
    if own:
        current = _class(original.__name__, (current,), own)

    def reduced(self: keras.Model) -> object:
        reduce: Function[object] = vars(definer(original, "__reduce__"))["__reduce__"]
        value = reduce(self)
        if isinstance(value, tuple) and isinstance(value[0], types.MethodType):
            unpickle, *others = value  # a method of a class of no module, by Keras
            if unpickle.__self__ is type(self):
                return types.MethodType(unpickle.__func__, original), *others
        return value

    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__class__": property(lambda self: original),
        "__new__": lambda cls, *args, **kwargs: original(*args, **kwargs),
        "__reduce__": reduced,
    }
    made = _class(original.__name__, (kind, current), namespace)
    vars(object)["__class__"].__set__(instance, made)


class _Unnoticed:
    """Keeps a script's classes from knowing of classes that are derived from them."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Do nothing."""


def _class(name: str, bases: tuple[type, ...], body: Mapping[str, object]) -> type:
    if not issubclass(bases[-1], _Unnoticed):
        bases = (_Unnoticed, *bases)
    metaclass, namespace, _ = types.prepare_class(name, bases)
    # Not by the metaclass: a script's may count classes, or refuse another of the same name.
    return type.__new__(metaclass, name, bases, {**namespace, **body})
