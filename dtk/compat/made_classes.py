"""Classes made for one object of Keras's, of which a strategy replaces methods."""

from __future__ import annotations

import types
from collections.abc import Mapping

import keras

from dtk.nests import Function
from dtk.patches import definer


def make_subclass(instance: keras.Model, kind: type[keras.Model], base: type[keras.Model]) -> None:
    """Give an object of Keras's a class made for it: a subclass of a kind, and of its own class.

    `instance.__class__` stays the class that the script made it of, under whose name Keras saves
    it; so files, copies and pickles are of that class, and need no dtk. `type(instance)` differs.

    Args:
        instance: An object of a subclass of `base`.
        kind: A subclass of `base`, whose methods come before the object's own.
        base: Keras's class, such as `keras.Model`.
    """
    original, current = instance.__class__, type(instance)
    # What a script has set on the object would hide the kind's methods, which call it instead.
    replaced = {name for one in kind.__mro__ if one not in base.__mro__ for name in vars(one)}
    own = {n: staticmethod(vars(instance).pop(n)) for n in replaced & vars(instance).keys()}
    if own:
        current = _class(original.__name__, (current,), own)

    def reduced(self: keras.Model) -> tuple[object, ...]:
        reduce: Function[tuple[types.MethodType, ...]] = vars(definer(original, "__reduce__"))[
            "__reduce__"
        ]
        if original.__reduce__ is not base.__reduce__:
            return reduce(self)
        unpickle, *values = reduce(self)  # a method of a class of no module
        return types.MethodType(unpickle.__func__, original), *values

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


def _class(name: str, bases: tuple[type, ...], body: Mapping[str, object]) -> type:
    return types.new_class(name, bases, exec_body=lambda namespace: namespace.update(body))
