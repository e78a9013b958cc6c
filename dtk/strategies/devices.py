"""Choose a rank's GPU and set it in TensorFlow before TensorFlow starts.

TensorFlow starts on every visible GPU and takes most of its memory. So if a host has several ranks,
each hides all GPUs except its own from its process. That works only before an operation runs and
before anything lists *logical* devices. Listing physical or visible devices starts nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import tensorflow as tf

from dtk import placement
from dtk.cluster import TFConfig
from dtk.cluster.place import Place
from dtk.communicators.base import Communicator
from dtk.errors import at_rank

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_STARTED = "TensorFlow had started before the strategy was made, so "
_FIRST = "; make the strategy first, at the top of the script"


def warn(rank: int, text: str, stacklevel: int) -> None:
    """Warn, with the rank, of what a script does; `stacklevel` as seen by the caller."""
    warnings.warn(at_rank(rank, text), RuntimeWarning, stacklevel=stacklevel + 1)


def pin(place: Place | Communicator, memory_growth: bool | None = None) -> str:
    """Take the GPU of this rank, and hide the others from TensorFlow."""
    gpus = tf.config.get_visible_devices("GPU")
    names = [gpu.name for gpu in gpus]
    try:
        index = choose_gpu(place.local_rank, place.local_size, names, restricted_by(names))
    except ValueError as error:
        raise ValueError(at_rank(place.rank, str(error))) from None
    if index is None:
        return placement.host()
    # A single process keeps all GPUs visible, as without dtk.
    if place.size > 1:
        try:
            tf.config.set_visible_devices([gpus[index]], "GPU")
        except RuntimeError:
            message = f"{_STARTED}this process holds memory on all {len(gpus)} GPUs it sees, and "
            warn(place.rank, f"{message}computes on {names[index]} alone{_FIRST}", 5)
        else:
            gpus, index = [gpus[index]], 0
    set_memory_growth(gpus, memory_growth, place.rank)
    return f"/gpu:{index}"


def take_gpu_of_task(config: TFConfig) -> str | None:
    """Take the GPU of a task of parameter servers, and hide the others from TensorFlow.

    A worker has the GPU of its place among the workers of its host, an evaluator the next one if
    there is one. Servers and the chief compute no steps, and would hold the memory of all.

    Returns:
        The GPU's name, such as "/physical_device:GPU:1"; None for the CPU.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return None
    names = [gpu.name for gpu in gpus]
    hosts = [address.rpartition(":")[0] for address in config.cluster["worker"]]
    index = None
    if config.role == "worker":
        host = hosts[config.index]
        earlier = hosts[: config.index].count(host)
        try:
            index = choose_gpu(earlier, hosts.count(host), names, restricted_by(names))
        except ValueError as error:
            raise ValueError(f"worker {config.index}: {error}") from None
    elif config.role == "evaluator":
        listed = config.cluster.get("evaluator")
        beside = hosts.count(listed[0].rpartition(":")[0]) if listed else len(hosts)
        index = beside if beside < len(gpus) else None
    try:
        tf.config.set_visible_devices([] if index is None else [gpus[index]], "GPU")
    except RuntimeError:
        message = (
            f"{_STARTED}the {config.role} holds memory on all {len(gpus)} GPUs it sees{_FIRST}"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=4)
    return None if index is None else names[index]


def choose_gpu(
    local_rank: int, local_size: int, names: Sequence[str], restricted: str | None = None
) -> int | None:
    """Choose a process's GPU from the visible ones; None if there are none.

    Example:
        >>> choose_gpu(1, 2, ["GPU:0", "GPU:1"])
        1
        >>> choose_gpu(1, 2, ["GPU:0"], "CUDA_VISIBLE_DEVICES=1")
        0
    """
    if not names:
        return None
    if restricted and len(names) == 1:
        return 0  # the launcher has given each rank one GPU
    if local_rank < len(names):
        return local_rank
    raise ValueError(
        f"local rank {local_rank} has no GPU of its own; it sees {len(names)} "
        f"({restricted or 'all of this host'}) for {local_size} ranks. Start at most {len(names)} "
        f"per host, or hide the GPUs with {_VARIABLE}=''"
    )


def restricted_by(visible: Sequence[str]) -> str | None:
    """Return the setting that hides GPUs of this host from this process, if known."""
    chosen = os.environ.get(_VARIABLE)
    if chosen is not None:
        return f"{_VARIABLE}={chosen}"
    if len(visible) < len(tf.config.list_physical_devices("GPU")):
        return "tf.config.set_visible_devices"  # the script, or an earlier strategy
    return None


def set_memory_growth(
    gpus: Sequence[tf.config.PhysicalDevice], memory_growth: bool | None, rank: int = 0
) -> None:
    """Set whether TensorFlow allocates GPU memory as it needs it."""
    if memory_growth is None:
        return
    try:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, memory_growth)
    except RuntimeError:
        warn(rank, f"{_STARTED}memory_growth={memory_growth} has no effect{_FIRST}", 4)


def link(communicator: Communicator, device: str) -> str:
    """Send floats from GPU to GPU if every rank has one; return this rank's device.

    All ranks call it together.
    """
    if communicator.size == 1 or communicator.name == "null":
        return device
    everyone = communicator.allgather_object((placement.is_gpu(device), _given(device)))
    without = [rank for rank, (has_gpu, _) in enumerate(everyone) if not has_gpu]
    if len(without) == communicator.size:
        return device
    shared = _shared([name for _, name in everyone], communicator)
    if not without:
        communicator.link(placement.reducing(device))
    if communicator.gpu_transport is not None and shared:
        raise ValueError(at_rank(communicator.rank, f"{shared}. NCCL takes one rank for each GPU"))
    told = ""
    if without:
        told = f"rank {without[0]} has no GPU, so gradients of all ranks go through host memory"
    elif communicator.gpu_transport is None:
        told = shared or (
            f"{communicator.name} sends gradients through host memory here. From GPU to GPU: start "
            "with `dtk run --communicator collective`, or build Horovod with NCCL "
            "(`dtk install-horovod`)"
        )
    if told and communicator.rank == 0:
        warn(0, told, 4)
    return device


def _given(device: str) -> str | None:
    """Return the name of the GPU that the launcher has given this process, if it gave one."""
    one = device != placement.host() and len(tf.config.list_physical_devices("GPU")) == 1
    return os.environ.get(_VARIABLE) if one else None


def _shared(names: Sequence[str | None], communicator: Communicator) -> str:
    """Describe two ranks of one host to which the launcher gave a GPU of the same name, if any."""
    place = communicator.place
    if place is not None and place.kind == "slurm":
        return ""  # Slurm may show every task its own GPU under the number 0
    places = list(zip(communicator.hosts, names, strict=True))
    for rank, (host, name) in enumerate(places):
        first = places.index((host, name))
        if name is not None and first < rank:
            return (
                f"ranks {first} and {rank} on {host} were both started with {_VARIABLE}={name}; if "
                "that is one GPU, they share its memory and its time. Start fewer ranks per host, "
                f"or leave {_VARIABLE} out: dtk gives each local rank a GPU"
            )
    return ""
