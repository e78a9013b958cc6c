"""Where tensors are: the one place that answers with the name of a device.

    host        what Python reads, and what counts and measures: this process's CPU
    messages    what a backend sends and receives, and the variables that keep messages in order
    reduction   what is computed of messages that have come: sums of blocks and of rows

A backend that takes tensors of a GPU needs another answer here, and nowhere else.
"""

from __future__ import annotations

_CPU = "CPU:0"


def host() -> str:
    """Return the device of what Python reads, counts and measures."""
    return _CPU


def messages() -> str:
    """Return the device on which backends take and leave the tensors of messages."""
    return _CPU


def reduction() -> str:
    """Return the device that adds up what messages bring."""
    return messages()
