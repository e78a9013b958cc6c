"""Contexts that replace attributes may be left in any order, by any thread."""

from __future__ import annotations

import gc
import threading
import types

import pytest

from dtk.patches import patch, temporarily


class Plain:
    def name(self) -> str:
        return "plain"

    @staticmethod
    def fixed() -> str:
        return "fixed"


class Derived(Plain):
    pass


def test_a_context_that_was_entered_first_may_be_left_first():
    first = patch(Plain, name=lambda self: "first")
    second = patch(Plain, name=lambda self: "second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert Plain().name() == "second"
    second.__exit__(None, None, None)
    assert Plain().name() == "plain"


def test_a_context_that_the_collector_ends_while_another_begins():
    """It waited for the lock that its own thread held."""

    class Allocating:
        name = "plain"

        def __setattr__(self, name: str, value: object) -> None:
            kept.clear()
            held = [[] for _ in range(10_000)]  # which calls the collector
            super().__setattr__(name, value if held else None)

    owner, entered, before = Allocating(), threading.Event(), gc.get_threshold()
    left_open = [patch(Plain, name=lambda self: "left open")]
    left_open.append(left_open)
    left_open[0].__enter__()
    kept = [left_open]
    del left_open

    def enter() -> None:
        with patch(owner, name="entered"):
            entered.set()

    thread = threading.Thread(target=enter, daemon=True)
    gc.set_threshold(1, 1, 1)
    try:
        thread.start()
        assert entered.wait(10)
    finally:
        gc.set_threshold(*before)
    thread.join()
    gc.collect()
    assert Plain().name() == "plain" == owner.name


def test_threads_that_replace_at_once_leave_nothing_patch():
    both_inside = threading.Barrier(2, timeout=10)

    def enter_and_leave(name: str) -> None:
        for _ in range(200):
            with patch(Plain, name=lambda self: name):
                both_inside.wait()

    threads = [threading.Thread(target=enter_and_leave, args=[name]) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert Plain().name() == "plain"


@pytest.mark.parametrize("owner, name", [(Derived, "name"), (Plain, "fixed"), (Plain(), "name")])
def test_what_an_owner_has_itself_is_as_before(owner, name):
    before = dict(vars(owner))
    with patch(owner, **{name: lambda *args: "replaced"}):
        assert getattr(owner, name)() == "replaced"
    assert dict(vars(owner)) == before


def test_an_attribute_is_as_before_when_its_context_ends_even_by_an_exception():
    thing = types.SimpleNamespace(name="own")
    with pytest.raises(KeyError), temporarily(thing, name="first"):
        with temporarily(thing, name="second"):
            assert thing.name == "second"
        assert thing.name == "first"
        raise KeyError
    assert thing.name == "own"
