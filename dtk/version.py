"""dtk's version, what it was tested with, and the commands that install these."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

__version__ = "0.1.0"
# What pip calls dtk. "dtk" itself is another project's name on the package index.
DISTRIBUTION = "keras-dtk"
# The first version of each that was tested, and the first after them that was not:
# docs/compatibility.md, which `make test-versions` writes. setup.cfg has the same bounds.
TESTED = {"tensorflow": ("2.20", "2.24"), "keras": ("3.13", "3.17")}


def pip_install(extra: str) -> str:
    """Return the command that adds an extra of setup.cfg to the dtk that runs here.

    It installs from where this dtk came from, which may be no index at all.
    """
    checkout = Path(__file__).resolve().parents[1]
    if _is_checkout(checkout):
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    return f"pip install {shlex.join(_wanted(extra))}"


def _is_checkout(folder: Path) -> bool:
    settings = folder / "setup.cfg"
    return settings.is_file() and f"name = {DISTRIBUTION}\n" in settings.read_text()


def _wanted(extra: str) -> list[str]:
    """Return what pip is to be given, by the record of what it was given (PEP 610)."""
    import importlib.metadata  # 20 ms, which only a message pays
    import json
    import urllib.parse

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
    folder = Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path))
    if url.startswith("file:") and _is_checkout(folder):
        return [f"{folder}[{extra}]"]
    if url.startswith("file:") and not folder.exists():  # then what the extra consists of
        split = (one.partition(";") for one in installed.requires or ())
        return [name.strip() for name, _, when in split if f"extra == '{extra}'" in _plain(when)]
    if "vcs_info" in record:
        url = f"{record['vcs_info']['vcs']}+{url}@{record['vcs_info']['commit_id']}"
    return [f"{wanted} @ {url}"]


def _plain(marker: str) -> str:
    return marker.replace('"', "'")


def is_tested(package: str, version: str) -> bool:
    """Return whether a version of TensorFlow or Keras is among those tested; a nightly may be.

    >>> is_tested("keras", "3.16.0.dev2026102704"), is_tested("keras", "3.9.2")
    (True, False)
    """
    first, end = TESTED[package]
    return _release(first) <= _release(version) < _release(end)


def requirement(package: str) -> str:
    """Return what pip is to install.

    >>> requirement("keras")
    'keras>=3.13,<3.17'
    """
    first, end = TESTED[package]
    return f"{package}>={first},<{end}"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
