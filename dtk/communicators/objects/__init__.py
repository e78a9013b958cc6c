"""Python values on their way between ranks.

TensorFlow's gRPC takes messages from anybody who reaches its port, and a pickle runs code where it
is read. So values are sent as data, which `plain` makes and which nothing is run to read. What is
no such data is sent as a pickle where the job has a secret to seal it with, as `dtk run` gives its
ranks, and refused elsewhere. With a secret everything is sealed: what was not written with it is
not read.

    value -> plain.encode -> data   -> sealing.seal -> payload     every job
          -> pickle.dumps -> pickle -> sealing.seal -> payload     with a secret, what is no data

>>> loads(dumps({"epoch": 3}))
{'epoch': 3}
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping

from dtk.cluster.variables import JOB_SECRET
from dtk.communicators.objects import plain, sealing
from dtk.communicators.objects.kinds import NotPlain
from dtk.errors import CommunicatorError

_DATA, _PICKLE = b"d", b"p"
_CURE = (
    f"give every rank the same {JOB_SECRET} (export {JOB_SECRET}="
    "$(python -c 'import secrets; print(secrets.token_hex())'); "
    f"mpirun -x {JOB_SECRET} ...), or start the job with `dtk run`"
)


def dumps(value: object, environ: Mapping[str, str] = os.environ) -> bytes:
    """Write a value for other ranks."""
    key = sealing.key_of(environ)
    try:
        return sealing.seal(_DATA, plain.encode(value), key)
    except NotPlain as refused:
        if not key:
            raise CommunicatorError(
                f"{refused} cannot be sent between ranks as plain data, and pickles are sent only "
                f"in jobs that have a secret to seal them with; {_CURE}"
            ) from None
    return sealing.seal(_PICKLE, pickle.dumps(value), key)


def loads(payload: bytes, environ: Mapping[str, str] = os.environ) -> object:
    """Read what another rank has written."""
    key = sealing.key_of(environ)
    content = sealing.unseal(payload, key)
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
        return plain.decode(body)
    except Exception as error:  # of a pickle: whatever its classes raise
        raise CommunicatorError(
            f"a value came that cannot be read ({type(error).__name__}: {error}); it is damaged, "
            "or ranks run different versions of dtk or of the script: start all with the same"
        ) from error
