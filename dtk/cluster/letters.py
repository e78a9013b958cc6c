"""Python values on their way between ranks.

A pickle runs code where it is read. Between ranks that TensorFlow's gRPC joins, which has no
password, a rank reads only what no stranger can have written, or what can do no harm:

    sealed       with the job's secret, which `dtk run` gives its ranks; any value
    data         without a secret: numbers, texts, containers, arrays, exceptions, records of dtk

MPI and Horovod are joined by their launcher: there a letter without a secret is any pickle.

>>> read(write({"epoch": 3}, is_private=False), is_private=False)
{'epoch': 3}
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import hmac
import io
import os
import pickle
import sys
from collections.abc import Mapping

from dtk.cluster.variables import JOB_SECRET
from dtk.errors import CommunicatorError

_SEALED, _OPEN = b"s", b"o"
_CODE_BYTES = 32
# What data is rebuilt by, besides exceptions and records of dtk.
_DATA = {
    "builtins": {"set", "frozenset", "complex", "bytearray", "range", "slice"},
    "collections": {"OrderedDict", "defaultdict", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy._core.numeric": {"_frombuffer"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "tensorflow.python.framework.dtypes": {"as_dtype"},
    "tensorflow.python.framework.tensor": {"TensorSpec"},
    "tensorflow.python.framework.tensor_shape": {"Dimension", "TensorShape"},
}


def write(value: object, is_private: bool, environ: Mapping[str, str] = os.environ) -> bytes:
    """Write a value for other ranks.

    Args:
        value: The value.
        is_private: Whether only ranks of this job can write to each other.
        environ: Holds the job's secret, if it has one.

    Returns:
        What `read` reads, with the same secret.

    Raises:
        CommunicatorError: There is no secret, and the value is more than data.
        Exception: The value cannot be pickled; what its class raises.
    """
    payload = pickle.dumps(value)
    key = _key(environ)
    if key:
        return _SEALED + hmac.digest(key, payload, "sha256") + payload
    if not is_private:
        _load_data(payload)  # on every rank alike, and first on that which has it
    return _OPEN + payload


def read(letter: bytes, is_private: bool, environ: Mapping[str, str] = os.environ) -> object:
    """Read what another rank has written.

    Args:
        letter: What `write` returned.
        is_private: Whether only ranks of this job can write to each other.
        environ: Holds the job's secret, if it has one.

    Returns:
        The value.

    Raises:
        CommunicatorError: It was not written with this job's secret, or holds more than data.
    """
    key, kind = _key(environ), letter[:1]
    if kind != (_SEALED if key else _OPEN):
        has, lacks = ("this rank", "the other") if key else ("the other", "this rank")
        raise CommunicatorError(
            f"a value came from a rank with another {JOB_SECRET}: {has} has one and {lacks} has "
            "none; give every rank the same, or start the job with `dtk run`"
        )
    if not key:
        return pickle.loads(letter[1:]) if is_private else _load_data(letter[1:])
    code, payload = letter[1 : 1 + _CODE_BYTES], letter[1 + _CODE_BYTES :]
    if not hmac.compare_digest(code, hmac.digest(key, payload, "sha256")):
        raise CommunicatorError(
            f"a value came that was not written with this job's {JOB_SECRET}, and was not read: a "
            "process of another job, or a stranger, writes to the ports of this one"
        )
    return pickle.loads(payload)


def _key(environ: Mapping[str, str]) -> bytes:
    return environ.get(JOB_SECRET, "").encode()


def _load_data(payload: bytes) -> object:
    return _DataReader(io.BytesIO(payload)).load()


class _DataReader(pickle.Unpickler):
    """Reads pickles of data: it calls nothing but what data is rebuilt by."""

    def find_class(self, module: str, name: str) -> object:
        """Return what a pickle names.

        Raises:
            CommunicatorError: It is more than data.
        """
        if name in _DATA.get(module, ()) or module.partition(".")[0] == "dtk":
            found = super().find_class(module, name)
            if module in _DATA or _is_record(found):
                return found
        # Of modules that the script has imported; this imports none.
        found = getattr(sys.modules.get(module, builtins), name, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
        raise CommunicatorError(
            f"a value of {module}.{name} is to be sent between ranks that nothing but TensorFlow's "
            "gRPC joins, where it could as well be a stranger's code: send numbers, texts, "
            "containers or arrays, start the job with `dtk run`, or give every rank the same "
            f"{JOB_SECRET}, a text that others cannot guess"
        )


def _is_record(found: object) -> bool:
    """Return whether it is a class of values alone."""
    if not isinstance(found, type):
        return False
    return dataclasses.is_dataclass(found) or issubclass(found, (tuple, enum.Enum, BaseException))
