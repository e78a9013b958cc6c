"""What is said to be supported is what was tested: setup.cfg, dtk.version, table and page.

Not in the fast tier, by whose runs `make test-versions` makes the page.
"""

from __future__ import annotations

import configparser
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtk import version

pytestmark = pytest.mark.command

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("dtk_tools_versions", ROOT / "tools/versions.py")
tool = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = tool  # where dataclasses look
_spec.loader.exec_module(tool)
ROWS = tool.rows()
PAGE = tool.written(tool.PAGE.read_text())


def number(text):
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


@pytest.fixture(scope="module")
def options():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return settings["options"]


@pytest.mark.parametrize("package", ["tensorflow", "keras"])
def test_pip_installs_what_dtk_takes_for_tested(options, package):
    assert version.requirement(package) in options["install_requires"].splitlines()


@pytest.mark.parametrize(("package", "column"), [("python", 2), ("tensorflow", 3), ("keras", 4)])
def test_bounds_are_the_lowest_in_the_table_and_what_follows_the_highest(options, package, column):
    asked = {str(row): getattr(row, package) for row in ROWS}
    seen = {name: line.split("|")[column] for name, line in PAGE.items()}
    # which release a nightly is, the page says once its row has been run
    known = [number(one) for one in [*asked.values(), *seen.values()] if one != "nightly"]
    if package == "python":
        first, end = re.fullmatch(r">=([\d.]+),<([\d.]+)", options["python_requires"]).groups()
    else:
        first, end = version.TESTED[package]
    major, minor = max(known)
    assert number(first) == min(known) and (major, minor) < number(end)
    if all(name in seen for name, one in asked.items() if one == "nightly"):
        assert number(end) == (major, minor + 1)


@pytest.mark.parametrize("row", PAGE)
def test_every_row_that_was_run_has_passed(row):
    cells = [cell.strip() for cell in PAGE[row].split("|")]
    assert row in map(str, ROWS)
    assert re.fullmatch(r"\d+ passed, 0 failed, \d+ skipped", cells[5]), cells
    assert float(cells[6]) < 1e-5 and cells[7] == "ok", cells


def test_a_row_that_was_not_asked_for_keeps_its_line():
    page = "| `3.11/2.21.0/3.15.1` | a | b |\n| `3.12/nightly/nightly` | c |\ntext\n"
    assert tool.written(page) == {
        "3.11/2.21.0/3.15.1": "| `3.11/2.21.0/3.15.1` | a | b |\n",
        "3.12/nightly/nightly": "| `3.12/nightly/nightly` | c |\n",
    }


def test_what_pip_is_given():
    nightly = tool.Row("3.11", "nightly", "nightly").requirements()
    assert nightly[:2] == ["tf-nightly", "keras-nightly"]
    # `keras` and `keras-nightly` are one package: the second is installed over the first
    mixed = tool.Row("3.11", "2.21.0", "nightly").requirements()
    assert mixed[0] == "tensorflow==2.21.0" and not any("keras" in one for one in mixed)
    for needed in (nightly, mixed):
        assert "pytest>=9" in needed and "click>=8.1" in needed
        assert not any(re.match(r"(tensorflow|keras)>", one) for one in needed)


def test_a_python_that_is_missing_is_told_and_the_row_left_out(tmp_path, capsys):
    told, good = tool.examine(tool.Row("3.99", "2.21.0", "3.15.1"), tmp_path, "0", [])
    assert (told, good) == ("", True)
    assert "Python 3.99 is not installed: this row is left out" in capsys.readouterr().out


def test_a_row_that_is_not_in_the_table_is_refused():
    argv = [sys.executable, ROOT / "tools/versions.py", "3.11/1.0/1.0"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "3.11/1.0/1.0 is not in versions.txt: expected one of 3.11/" in ended.stderr
