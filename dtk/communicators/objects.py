"""Python values on their way between ranks.

TensorFlow's gRPC takes messages from anybody who reaches its port, and a pickle runs code where it
is read. So values are sent as data, which `plain_data` makes and which nothing is run to read. A
value that is no such data is sent as a pickle where the job has a secret to seal it with, as `dtk
run` gives its ranks, and refused elsewhere. With a secret everything is sealed, and a payload that
was not written with it is not read.

    payload, with a secret       s   code of all that follows (32 bytes)   d: data, or p: pickle
    payload, without a secret    o                                         d: data

>>> loads(dumps({"epoch": 3}))
{'epoch': 3}
"""

from __future__ import annotations

import hmac
import os
import pickle
from collections.abc import Mapping

from dtk.cluster.variables import JOB_SECRET
from dtk.communicators import plain_data
from dtk.errors import CommunicatorError

_SEALED, _OPEN = b"s", b"o"
_DATA, _PICKLE = b"d", b"p"
_CODE_BYTES = 32
_PART = 1 << 30  # bytes: OpenSSL takes less than 2 GiB at a time
_CURE = (
    f"give every rank the same {JOB_SECRET} (export {JOB_SECRET}="
    "$(python -c 'import secrets; print(secrets.token_hex())'); "
    f"mpirun -x {JOB_SECRET} ...), or start the job with `dtk run`"
)


def dumps(value: object, environ: Mapping[str, str] = os.environ) -> bytes:
    """Write a value for other ranks; `loads` reads it with the same secret of `environ`."""
    key = environ.get(JOB_SECRET, "").encode()
    body: bytes | memoryview
    try:
        kind, body = _DATA, plain_data.encode(value)
    except plain_data.NotPlain as refused:
        if not key:
            raise CommunicatorError(
                f"{refused} cannot be sent between ranks as plain data, and pickles are sent only "
                f"in jobs that have a secret to seal them with; {_CURE}"
            ) from None
        kind, body = _PICKLE, pickle.dumps(value)
    code = _SEALED + _code(key, kind, memoryview(body)) if key else _OPEN
    return b"".join((code, kind, body))


def loads(payload: bytes, environ: Mapping[str, str] = os.environ) -> object:
    """Read what another rank has written; damage of any kind is a `CommunicatorError`."""
    key = environ.get(JOB_SECRET, "").encode()
    content = _unseal(payload, key)
    kind, body = bytes(content[:1]), content[1:]
    if kind == _PICKLE and not key:
        raise CommunicatorError(
            "a pickle came, and was not read: it runs code, and this job has no secret that would "
            f"tell who wrote it; {_CURE}"
        )
    try:
        if kind == _PICKLE:
            return pickle.loads(body)
        if kind != _DATA:
            raise ValueError(f"{kind!r} is no kind of content")
        return plain_data.decode(body)
    except Exception as error:  # of a pickle: whatever its classes raise
        raise CommunicatorError(
            f"a value came that cannot be read ({type(error).__name__}: {error}); it is damaged, "
            "or ranks run different versions of dtk or of the script: start all with the same"
        ) from error


def _unseal(payload: bytes, key: bytes) -> memoryview:
    if payload[:1] != (_SEALED if key else _OPEN):
        has, lacks = ("this rank", "the other") if key else ("the other", "this rank")
        raise CommunicatorError(
            f"a value came from a rank with another {JOB_SECRET}: {has} has one and {lacks} has "
            "none; give every rank the same, or start the job with `dtk run`"
        )
    if not key:
        return memoryview(payload)[1:]
    content = memoryview(payload)[1 + _CODE_BYTES :]
    if not hmac.compare_digest(payload[1 : 1 + _CODE_BYTES], _code(key, b"", content)):
        raise CommunicatorError(
            f"a value came that was not written with this job's {JOB_SECRET}, and was not read: a "
            "process of another job, or a stranger, writes to the ports of this one"
        )
    return content


def _code(key: bytes, kind: bytes, body: memoryview) -> bytes:
    code = hmac.new(key, kind, digestmod="sha256")
    for begin in range(0, len(body), _PART):
        code.update(body[begin : begin + _PART])
    return code.digest()
