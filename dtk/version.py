"""dtk's version, the tested versions of TensorFlow and Keras, and the pip commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

__version__ = "0.1.0"
# dtk's name for pip. "dtk" itself is another project's name on the package index.
DISTRIBUTION = "keras-dtk"
# The first tested version of each, and the first untested one after it: docs/compatibility.md,
# which `make test-versions` writes. setup.cfg has the same bounds.
TESTED = {"tensorflow": ("2.20", "2.24"), "keras": ("3.13", "3.17")}


def pip_install(extra: str) -> str:
    """Return the pip command that adds an extra of setup.cfg to this dtk.

    The command installs from this dtk's own source: a checkout, a file, a URL or the index.
    """
    checkout = Path(__file__).resolve().parents[1]
    if _is_checkout(checkout):
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    return f"pip install {shlex.join(_wanted(extra))}"


def installations() -> dict[Path, dict[str, str]]:
    """Return the folders named dtk of all installed distributions, and what installed each."""
    import importlib.metadata  # takes 20 ms, so only messages import it
    import json

    found: dict[Path, dict[str, str]] = {}
    for name in sorted(set(importlib.metadata.packages_distributions().get("dtk", ()))):
        for one in importlib.metadata.distributions(name=name):
            record = json.loads(one.read_text("direct_url.json") or "{}")
            editable = bool(record.get("dir_info", {}).get("editable"))
            parent = _path(record["url"]) if editable else Path(str(one.locate_file("")))
            owners = found.setdefault((parent / "dtk").resolve(), {})
            if editable or name not in owners:  # an editable checkout has a second record inside
                owners[name] = f"{name} {one.version}" + ", editable" * editable
    return found


def _path(url: str) -> Path:
    """Return the path of a URL of a file."""
    import urllib.parse

    return Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path))


def _is_checkout(folder: Path) -> bool:
    settings = folder / "setup.cfg"
    return settings.is_file() and f"name = {DISTRIBUTION}\n" in settings.read_text()


def _wanted(extra: str) -> list[str]:
    """Return the arguments for pip, from the record of the first installation (PEP 610)."""
    import importlib.metadata  # takes 20 ms, so only messages import it
    import json

    wanted = f"{DISTRIBUTION}[{extra}]"
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return [wanted]
    told = installed.read_text("direct_url.json")
    if told is None:
        return [wanted]
    record = json.loads(told)
    url = str(record["url"])
    folder = _path(url)
    if url.startswith("file:") and _is_checkout(folder):
        return [f"{folder}[{extra}]"]
    if url.startswith("file:") and not folder.exists():  # the file is gone: list the extra's parts
        split = (one.replace('"', "'").partition(";") for one in installed.requires or ())
        return [name.strip() for name, _, when in split if f"extra == '{extra}'" in when]
    if "vcs_info" in record:
        url = f"{record['vcs_info']['vcs']}+{url}@{record['vcs_info']['commit_id']}"
    return [f"{wanted} @ {url}"]


def is_tested(package: str, version: str) -> bool:
    """Return whether a version of TensorFlow or Keras was tested; a nightly counts by its number.

    >>> is_tested("keras", "3.16.0.dev2026102704"), is_tested("keras", "3.9.2")
    (True, False)
    """
    first, end = TESTED[package]
    return _release(first) <= _release(version) < _release(end)


def requirement(package: str) -> str:
    """Return the requirement of a package for pip.

    >>> requirement("keras")
    'keras>=3.13,<3.17'
    """
    first, end = TESTED[package]
    return f"{package}>={first},<{end}"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
