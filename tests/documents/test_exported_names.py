"""What users can import is documented fully: every name has a docstring, with its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType

import pytest
import tensorflow as tf

import dtk


def exported(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Return what a part exports, and the parts that are exported with it."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            yield from exported(value)
        elif inspect.isclass(value) or inspect.isroutine(value):
            yield f"{module.__name__}.{name}", value


def methods(cls: type) -> Iterator[tuple[str, FunctionType]]:
    """Return the public methods and properties of a class, where dtk defines them first."""
    for name in dir(cls):
        owners = [owner for owner in cls.__mro__ if name in vars(owner)]
        if not owners:
            continue  # of the class's class, such as an enum's
        value = vars(owners[-1])[name]
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        ours = owners[-1].__module__.startswith("dtk.") and isinstance(function, FunctionType)
        # What `on_` begins are hooks; the class of callbacks says when each is called.
        if ours and not name.startswith(("_", "on_")):
            yield name, function


def missing(name: str, described: object, signature: Callable) -> list[str]:
    """Return what the docstring of a name does not tell."""
    text = inspect.getdoc(described) or ""
    if not text:
        return [f"{name} has no docstring"]
    if inspect.isclass(described):
        if issubclass(described, BaseException):
            return []
        # A family of layers describes the arguments that all have in its base.
        text = "".join(owner.__doc__ or "" for owner in described.__mro__)
    parameters = inspect.signature(signature).parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return [
        f"{name} does not describe {argument}"
        for argument in named
        if argument not in ("self", "cls") and f"{argument}:" not in text
    ]


@pytest.mark.parametrize("part", [name for name in dtk.__all__ if not name.startswith("_")])
def test_every_exported_name_describes_its_arguments(part):
    found = getattr(dtk, part)
    names = exported(found) if inspect.ismodule(found) else [(f"dtk.{part}", found)]
    wrong = []
    for name, value in names:
        wrong += missing(name, value, value) if callable(value) else []
        if inspect.isclass(value):
            for method, function in methods(value):
                wrong += missing(f"{name}.{method}", function, function)
    assert not wrong, "\n".join(wrong)


def test_strategies_have_no_constructor_of_tensorflow():
    """Had one no docstring, Python would show the one it inherits, with a cluster_resolver."""
    for name in dtk.strategies.__all__:
        found = getattr(dtk.strategies, name)
        if inspect.isclass(found) and issubclass(found, tf.distribute.Strategy):
            assert inspect.getdoc(found.__init__).startswith("Take the arguments")
            assert "self" not in inspect.signature(found).parameters
