"""What it takes before the first batch can be read."""

from __future__ import annotations

import pytest

from dtk.strategies import slicing

from strategies import feeding_bodies

pytestmark = pytest.mark.parametrize("backend, size", [("collective", 2)])


def test_cutting_is_not_converted_by_autograph(world, backend, size):
    """Converting took ten times as long as tracing; converted code is in files of its own."""
    for _, files in world(backend, size).run(feeding_bodies.fit):
        assert files == [slicing.__file__]


def test_fit_builds_a_pipeline_once(world, backend, size):
    """Keras builds one, which is cut as it is. dtk asked for another, and cut that."""
    for built, _ in world(backend, size).run(feeding_bodies.fit):
        assert built == 1
