"""What refused.md gives is refused, in its words."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import dtk
from dtk.cli.main import main
from dtk.cluster import detect, parse_hostfile
from dtk.cluster.slurm import expand_nodelist, expand_tasks_per_node

PAGE = Path(__file__).with_name("refused.md")
ROW = re.compile(r"^\| `(.+?)` \| (.+) \|$", re.MULTILINE)
ROWS = [(given.replace("\\|", "|"), says) for given, says in ROW.findall(PAGE.read_text())]
NAMES = {
    "dtk": dtk,
    "float": float,
    "parse_hostfile": parse_hostfile,
    "expand_nodelist": expand_nodelist,
    "expand_tasks_per_node": expand_tasks_per_node,
}


def said_to(given, monkeypatch):
    if given.startswith("dtk "):
        done = CliRunner().invoke(main, shlex.split(given)[1:])
        assert done.exit_code == 2, done.output
        return done.output
    variable = re.fullmatch(r"([A-Z_]+)=(.+)", given)
    with pytest.raises((ValueError, dtk.errors.DtkError)) as caught:
        if variable:
            monkeypatch.setenv(variable[1], shlex.split(variable[2])[0])
            detect()
            dtk.strategies.AllReduceStrategy()
        else:
            eval(given, NAMES)
    return str(caught.value)


def test_the_page_has_its_fifty_rows():
    assert len(ROWS) >= 50
    assert len(dict(ROWS)) == len(ROWS)


@pytest.mark.parametrize(("given", "says"), ROWS, ids=[given for given, _ in ROWS])
def test_it_is_refused_in_these_words(given, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for name in ("TF_CONFIG", "DTK_COMMUNICATOR", "DTK_STALL_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    said = " ".join(said_to(given, monkeypatch).split())
    # "..." stands for what depends on the machine, or is told elsewhere
    assert re.search(".*".join(map(re.escape, says.split("..."))), said), said
    assert os.listdir() == ["train.py"], "nothing was written"
