"""Kinds of the standard library's values."""

from __future__ import annotations

import datetime
import pathlib
from collections import OrderedDict
from collections.abc import Mapping

from dtk.communicators.objects.kinds import Kind


def _pairs(mapping: Mapping[object, object]) -> list[list[object]]:
    return [[key, value] for key, value in mapping.items()]


def _of_moment(moment: datetime.datetime) -> list[object]:
    return [moment.replace(tzinfo=None, fold=0).isoformat(), moment.tzinfo, moment.fold]


def _moment(text: str, zone: datetime.tzinfo | None, fold: int) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold)


_PATH = type(pathlib.Path())

# By the class of a value, which must be this one and no subclass: a script's own may do anything.
KINDS: dict[type, Kind] = {
    tuple: Kind("tuple", list, tuple),
    dict: Kind("dict", _pairs, dict),
    OrderedDict: Kind("OrderedDict", _pairs, OrderedDict),
    set: Kind("set", list, set),
    frozenset: Kind("frozenset", list, frozenset),
    complex: Kind("complex", lambda number: [number.real, number.imag], complex, (float, float)),
    range: Kind("range", lambda r: [r.start, r.stop, r.step], range, (int, int, int)),
    _PATH: Kind("path", lambda path: [str(path)], pathlib.Path, (str,)),
    pathlib.PurePosixPath: Kind(
        "pure path", lambda path: [str(path)], pathlib.PurePosixPath, (str,)
    ),
    datetime.date: Kind(
        "date", lambda day: [day.year, day.month, day.day], datetime.date, (int, int, int)
    ),
    datetime.datetime: Kind("datetime", _of_moment, _moment, (str, None, int)),
    datetime.timedelta: Kind(
        "timedelta",
        lambda span: [span.days, span.seconds, span.microseconds],
        datetime.timedelta,
        (int, int, int),
    ),
    datetime.timezone: Kind(
        "timezone",
        lambda zone: zone.__getinitargs__(),
        lambda parts: datetime.timezone(*parts),
    ),
}
