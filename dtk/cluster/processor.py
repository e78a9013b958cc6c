"""What a machine computes with."""

from __future__ import annotations

import platform


def instructions() -> str:
    """Return the instruction sets of the first core, and its maker's name for it."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return str([line for line in lines if line.startswith(("model name", "flags", "Features"))])
