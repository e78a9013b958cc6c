"""What is changed in Horovod's published source before it is compiled.

- `xla_mpi_ops.cc`, optional ops for XLA on GPUs, includes headers that TensorFlow 2.21 has moved:
  the one line that compiles it goes.
- Over Gloo, process sets (the global one is among them) ignore HOROVOD_GLOO_IFACE, as they read the
  interface from a context that was never given one; they listen on the address of the host's own
  name. Debian's /etc/hosts says 127.0.1.1 for that, where no other host can reach it, and ranks on
  several hosts abort. They are given the interface of the global context.
"""

from __future__ import annotations

import pathlib

from dtk.horovod_build.requirements import HOROVOD_VERSION, HorovodBuildError

VERSION = 2  # goes up with each change here, so that cached wheels are made anew
CMAKE_LISTS = "horovod/tensorflow/CMakeLists.txt"
XLA_SOURCE = "horovod/tensorflow/xla_mpi_ops.cc"
GLOO_CONTEXT = "horovod/common/gloo/gloo_context.cc"
# A module that tells an installed Horovod with these patches from one without.
MARK = "horovod/dtk_patches.py"
_OTHER = (
    f"this is not the published horovod {HOROVOD_VERSION}. "
    "Next: dtk install-horovod without --sdist"
)
_PROCESS_SETS = "void GlooContext::InitializeForProcessSet("
_OWN_INTERFACE = "device_attr.iface = gloo_iface_;"
_GLOBAL_INTERFACE = "device_attr.iface = gloo_iface_ = global_context.gloo_iface_;"


def apply(source: pathlib.Path) -> None:
    """Make all changes."""
    leave_out_xla(source / CMAKE_LISTS)
    put_process_sets_on_interface(source / GLOO_CONTEXT)
    (source / MARK).write_text(f"VERSION = {VERSION}\n")


def put_process_sets_on_interface(gloo_context: pathlib.Path) -> None:
    """Give process sets the interface that HOROVOD_GLOO_IFACE names."""
    before, function, body = gloo_context.read_text().partition(_PROCESS_SETS)
    count = body.count(_OWN_INTERFACE)
    if not function or count != 1:
        raise HorovodBuildError(
            f"{GLOO_CONTEXT} sets the interface of process sets {count} times, expected 1: {_OTHER}"
        )
    body = body.replace(_OWN_INTERFACE, _GLOBAL_INTERFACE)
    gloo_context.write_text(before + function + body)


def leave_out_xla(cmake_lists: pathlib.Path) -> None:
    """Delete the one line that compiles the XLA ops."""
    lines = cmake_lists.read_text().splitlines(keepends=True)
    kept = [line for line in lines if XLA_SOURCE not in line]
    if len(lines) - len(kept) != 1:
        raise HorovodBuildError(
            f"{CMAKE_LISTS} names {XLA_SOURCE} on {len(lines) - len(kept)} lines, expected 1: "
            f"{_OTHER}"
        )
    cmake_lists.write_text("".join(kept))
