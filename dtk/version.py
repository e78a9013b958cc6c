"""dtk's version, and the command that installs more of it."""

from __future__ import annotations

import shlex
from pathlib import Path

__version__ = "0.1.0"
# What pip calls dtk. "dtk" itself is another project's name on the package index.
DISTRIBUTION = "keras-dtk"


def pip_install(extra: str) -> str:
    """Return the command that adds an extra of setup.cfg to the dtk that runs here.

    It installs from where this dtk came from, which may be no index at all.

    Args:
        extra: Such as "mpi".
    """
    checkout = Path(__file__).resolve().parents[1]
    if _is_checkout(checkout):
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    return f"pip install {shlex.quote(_source(extra))}"


def _is_checkout(folder: Path) -> bool:
    settings = folder / "setup.cfg"
    return settings.is_file() and f"name = {DISTRIBUTION}\n" in settings.read_text()


def _source(extra: str) -> str:
    """Return what pip is to be given, by the record of what it was given (PEP 610)."""
    import importlib.metadata  # 20 ms, which only a message pays
    import json
    import urllib.parse

    wanted = f"{DISTRIBUTION}[{extra}]"
    try:
        told = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        told = None
    if told is None:
        return wanted
    record = json.loads(told)
    url = str(record["url"])
    folder = Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path))
    if url.startswith("file:") and _is_checkout(folder):
        return f"{folder}[{extra}]"
    if "vcs_info" in record:
        url = f"{record['vcs_info']['vcs']}+{url}@{record['vcs_info']['commit_id']}"
    return f"{wanted} @ {url}"
