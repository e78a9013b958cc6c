"""Seals: who does not know the job's secret writes nothing that is read.

payload, with a secret       s   code of all that follows (32 bytes)   content
payload, without a secret    o   content
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from dtk.cluster.variables import JOB_SECRET
from dtk.errors import CommunicatorError

_SEALED, _OPEN = b"s", b"o"
_CODE_BYTES = 32
_PART = 1 << 30  # bytes: OpenSSL takes less than 2 GiB at a time


def key_of(environ: Mapping[str, str]) -> bytes:
    """Return the job's secret; nothing where it has none."""
    return environ.get(JOB_SECRET, "").encode()


def seal(kind: bytes, body: bytes, key: bytes) -> bytes:
    """Write a content, sealed if there is a secret."""
    code = _SEALED + _code(key, kind, memoryview(body)) if key else _OPEN
    return b"".join((code, kind, body))


def unseal(payload: bytes, key: bytes) -> memoryview:
    """Return the content of a payload that was written with the same secret."""
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
