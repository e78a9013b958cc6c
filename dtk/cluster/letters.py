"""Python values on their way between ranks.

They are pickles, which run code where they are read, and TensorFlow's gRPC takes messages from
anybody who reaches its port. So they are sealed with a secret of the job, which `dtk run` gives its
ranks: what was not written with it is not read. Where a job has no secret, ranks trust what comes.

>>> read(write({"epoch": 3}))
{'epoch': 3}
"""

from __future__ import annotations

import hmac
import os
import pickle
from collections.abc import Mapping

from dtk.cluster.variables import JOB_SECRET
from dtk.errors import CommunicatorError

_SEALED, _OPEN = b"s", b"o"
_CODE_BYTES = 32
_PART = 1 << 30  # bytes: OpenSSL takes less than 2 GiB at a time


def write(value: object, environ: Mapping[str, str] = os.environ) -> bytes:
    """Write a value for other ranks.

    Args:
        value: What can be pickled.
        environ: Holds the job's secret, if it has one.

    Returns:
        What `read` reads, with the same secret.

    Raises:
        Exception: The value cannot be pickled; what its class raises.
    """
    payload = pickle.dumps(value)
    key = _key(environ)
    start = _SEALED + _code(key, memoryview(payload)) if key else _OPEN
    return start + payload


def read(letter: bytes, environ: Mapping[str, str] = os.environ) -> object:
    """Read what another rank has written.

    Args:
        letter: What `write` returned.
        environ: Holds the job's secret, if it has one.

    Returns:
        The value.

    Raises:
        CommunicatorError: It was not written with this job's secret.
    """
    key, kind = _key(environ), letter[:1]
    if kind != (_SEALED if key else _OPEN):
        has, lacks = ("this rank", "the other") if key else ("the other", "this rank")
        raise CommunicatorError(
            f"a value came from a rank with another {JOB_SECRET}: {has} has one and {lacks} has "
            "none; give every rank the same, or start the job with `dtk run`"
        )
    if not key:
        return pickle.loads(memoryview(letter)[1:])
    payload = memoryview(letter)[1 + _CODE_BYTES :]
    if not hmac.compare_digest(letter[1 : 1 + _CODE_BYTES], _code(key, payload)):
        raise CommunicatorError(
            f"a value came that was not written with this job's {JOB_SECRET}, and was not read: a "
            "process of another job, or a stranger, writes to the ports of this one"
        )
    return pickle.loads(payload)


def _key(environ: Mapping[str, str]) -> bytes:
    return environ.get(JOB_SECRET, "").encode()


def _code(key: bytes, payload: memoryview) -> bytes:
    code = hmac.new(key, digestmod="sha256")
    for begin in range(0, len(payload), _PART):
        code.update(payload[begin : begin + _PART])
    return code.digest()
