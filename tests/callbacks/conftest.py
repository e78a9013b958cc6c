"""One process for what needs no other: plain Keras, a world of one, two mirrored devices."""

from __future__ import annotations

import pytest

from callbacks import bodies
from support.world import World


@pytest.fixture(scope="session")
def alone():
    """A process of its own, whose TensorFlow has two CPU devices from the start."""
    process = World("local", 1)
    process.run(bodies.make_devices)
    yield process
    process.close()
