"""Values written as data, which nothing is run to read: JSON, and the bytes that it cannot hold.

    length of the JSON (8 bytes, little endian)   JSON   bytes, one after the other

    in Python                                  in JSON
    None, a bool, str, float or small int      itself, NaN and infinities too
    a list                                     a list
    bytes                                      {"bytes": length}: the next ones
    a large int                                {"int": in hexadecimal digits}
    what the table of kinds knows              {"kind": [simpler values]}

A kind is chosen by the class alone, never by a subclass's, so a value comes back as what it was or
is not written (`NotPlain`). What is read may have been written by anybody: a value takes memory in
proportion to what came, and no class is called but those of the tables.

>>> decode(encode(("rate", {3: 0.5})))
('rate', {3: 0.5})
"""

from __future__ import annotations

import json

from dtk.communicators.objects import arrays, records, standard, tensors
from dtk.communicators.objects.kinds import Kind, NotPlain, name_of

_LENGTH_BYTES = 8
_SMALL = 1 << 63
_ITSELF = (type(None), bool, str, float)
_BY_CLASS = {**standard.KINDS, **tensors.KINDS}
_BY_NAME = {kind.name: kind for kind in _BY_CLASS.values()} | arrays.BY_NAME | records.BY_NAME


def encode(value: object) -> bytes:
    """Write a value as data."""
    blobs: list[bytes] = []
    try:
        tree = _apart(value, blobs)
        text = json.dumps(tree, ensure_ascii=False, check_circular=False, separators=(",", ":"))
    except RecursionError:
        raise NotPlain(f"a {name_of(type(value))} that is nested too deeply") from None
    header = text.encode(errors="surrogatepass")
    return b"".join((len(header).to_bytes(_LENGTH_BYTES, "little"), header, *blobs))


def decode(data: bytes | memoryview) -> object:
    """Read a value."""
    try:
        blobs = _Blobs(memoryview(data))
        length = int.from_bytes(blobs.take(_LENGTH_BYTES), "little")
        value = _together(json.loads(str(blobs.take(length), "utf-8", "surrogatepass")), blobs)
        blobs.end()
    except Exception as error:  # each constructor refuses in its own way what does not fit
        raise ValueError(f"not as dtk writes it: {type(error).__name__}: {error}") from error
    return value


def _apart(value: object, blobs: list[bytes]) -> object:
    """Return what JSON can hold, and append the bytes that it cannot."""
    kind = type(value)
    if kind in _ITSELF:
        return value
    if isinstance(value, int) and kind is int:
        return value if -_SMALL <= value < _SMALL else {"int": hex(value)}
    if isinstance(value, list) and kind is list:
        return [_apart(item, blobs) for item in value]
    if isinstance(value, bytes) and kind is bytes:
        blobs.append(value)
        return {"bytes": len(value)}
    how = _kind_of(value)
    return {how.name: [_apart(part, blobs) for part in how.take_apart(value)]}


def _kind_of(value: object) -> Kind:
    found = _BY_CLASS.get(type(value)) or arrays.kind_of(value) or records.kind_of(value)
    if found is None:
        raise NotPlain(name_of(type(value)))
    return found


def _together(tree: object, blobs: _Blobs) -> object:
    if isinstance(tree, list):
        return [_together(item, blobs) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((name, content),) = tree.items()
    if name == "bytes":
        return blobs.take(content)
    if name == "int":
        return int(content, 16)
    if not isinstance(content, list):
        raise ValueError(f"{name} of {type(content).__name__}")
    return _BY_NAME[name].made_of([_together(part, blobs) for part in content])


class _Blobs:
    """Bytes that are taken one after the other, each once: none can be counted twice."""

    def __init__(self, data: memoryview):
        self._left = data

    def take(self, length: object) -> bytes:
        if type(length) is not int or not 0 <= length <= len(self._left):
            raise ValueError(f"{length} bytes of {len(self._left)}")
        taken, self._left = self._left[:length], self._left[length:]
        return taken.tobytes()

    def end(self) -> None:
        if len(self._left):
            raise ValueError(f"{len(self._left)} bytes too many")
