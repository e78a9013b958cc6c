"""Reading numbers out of environment variables, with errors that name the variable."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dtk.cluster.place import Place
from dtk.errors import ClusterError

# What `communicator="auto"` is to mean: to `dtk run` by the user, to its ranks by `dtk run`.
COMMUNICATOR = "DTK_COMMUNICATOR"
# What values between ranks are sealed with, equal on all ranks; see `dtk.communicators.objects`.
JOB_SECRET = "DTK_JOB_SECRET"
# "0" and "1" overrule what strategies say of `self_test`; "only" ends the script after it.
SELF_TEST = "DTK_SELF_TEST"
# In a rank whose server of MPI is dtk's; see `dtk.cluster.pmix`.
MPI_SERVER = "DTK_MPI_SERVER"
# In a rank that has joined the others: its process, and its place in the job.
JOINED = "DTK_JOINED"
# In a rank: how often its job was started before.
RESTARTS = "DTK_RESTARTS"
# Seconds that ranks have to save in when their job is ended; see `dtk.cluster.progress`.
SAVE_GRACE = "DTK_SAVE_GRACE"
# In a rank: a file to write the times of steps to, instead of training; see `dtk tune`.
TIME_STEPS = "DTK_TIME_STEPS"
# "1": what `jit_compile="auto"` is to mean also where Keras would not choose XLA, as on CPUs.
JIT_COMPILE = "DTK_JIT_COMPILE"
# "1" or "0": whether batch normalization trains by TensorFlow's fused operation; by default between
# replicas. See `dtk.kernels.fused_layers`.
FUSED_BATCH_NORM = "DTK_FUSED_BATCH_NORM"
# In a rank: the model that its settings were measured with. From the user, "0": use none of them.
STEP_SETTINGS = "DTK_STEP_SETTINGS"
# What another launcher, or an outer `dtk run`, may have left in the environment: a rank must not
# take it for its own.
OF_OTHER_LAUNCHERS = (
    "TF_CONFIG",
    "DTK_HOSTS",
    JOINED,
    MPI_SERVER,
    "OMPI_COMM_WORLD_",
    "PMI_",
    "PMIX_",
    "MPI_LOCAL",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_CROSS_",
    "HOROVOD_GLOO_RENDEZVOUS_",
    "HOROVOD_GLOO_IFACE",
    "HOROVOD_HOSTNAME",
    "HOROVOD_LOCAL_",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
)


def is_foreign(name: str) -> bool:
    """Return whether a variable places a process in some other job."""
    return name.startswith(OF_OTHER_LAUNCHERS)


def joined(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the process that has joined others by these variables, and its place; see JOINED.

    >>> joined({"DTK_JOINED": "7 rank 1 of node1:29500"}), joined({})
    (('7', 'rank 1 of node1:29500'), ('', ''))
    """
    process, _, place = environ.get(JOINED, "").partition(" ")
    return process, place


def is_number(text: str) -> bool:
    """Return whether a variable's text is a rank's number, or how many there are.

    As to `int`, spaces around it do not matter, such as the end of a line of a file from Windows.
    """
    return re.fullmatch("[0-9]{1,9}", text.strip()) is not None


def integer(environ: Mapping[str, str], name: str) -> int:
    """Read one variable that is set as an integer.

    >>> integer({"PMI_RANK": "3"}, "PMI_RANK")
    3
    """
    try:
        return int(environ[name])
    except ValueError:
        raise ClusterError(
            f"{name}={environ[name]!r}, expected a whole number; unset it or start again"
        ) from None


def switch(environ: Mapping[str, str], name: str, default: bool) -> bool:
    """Read one variable that turns something on or off.

    >>> switch({"DTK_JIT_COMPILE": "1"}, "DTK_JIT_COMPILE", default=False)
    True
    """
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ClusterError(f"{name}={value!r}, expected 0 or 1; set one of them, or unset it")
    return value == "1" if value else default


def place_by(
    environ: Mapping[str, str], kind: str, names: tuple[str, str], *local: tuple[str, str]
) -> Place:
    """Read a place in a job by the names of its rank and size.

    Args:
        environ: Variables to read.
        kind: The kind of place.
        names: Of the rank and the size.
        local: Of those on one host; the first pair that is set counts.

    >>> place_by({"R": "1", "N": "4"}, "mpi", ("R", "N"), ("LR", "LN")).tells_local_rank
    False
    """
    rank, size = place(environ, *names)
    there = next((pair for pair in local if environ.keys() & set(pair)), None)
    local_rank, local_size = (0, 1) if there is None else place(environ, *there)
    is_told = there is not None or size == 1
    return Place(kind, rank, size, local_rank, local_size, tells_local_rank=is_told)


def place(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    """Read a rank and the size of its group, and check that they fit.

    >>> place({"R": "1", "N": "4"}, "R", "N")
    (1, 4)
    """
    for present, missing in ((rank_name, size_name), (size_name, rank_name)):
        if present in environ and missing not in environ:
            raise ClusterError(
                f"{present}={environ[present]} is set but {missing} is not; "
                f"unset {present} to run alone, or start again with the launcher that sets both"
            )
    rank, size = integer(environ, rank_name), integer(environ, size_name)
    if size < 1 or not 0 <= rank < size:
        raise ClusterError(
            f"{rank_name}={rank} with {size_name}={size}: expected 0 <= rank < size; "
            "unset both, or start again with the launcher that set them"
        )
    return rank, size
