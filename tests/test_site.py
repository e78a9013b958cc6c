"""`make docs` builds a whole site, which needs no server, and asks no other host for anything."""

import html
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dtk
from dtk.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
# What a browser fetches by itself; links are followed by readers only.
FETCHED = re.compile(r'<(?:script|img|iframe|link)\b[^>]*(?:src|href)="?(https?:)?//[^>]*>')
H2 = re.compile(r"<h2.*?</h2>", re.DOTALL)

pytestmark = [
    pytest.mark.command,
    pytest.mark.full("half a minute"),
    pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="no extra `docs`"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    given = [f"BIN={Path(sys.executable).parent}", f"SITE={folder}"]
    made = ["make", "-o", ".venv/.for-docs", "docs", *given]
    done = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr  # warnings are errors: mkdocs.yml
    return folder


def text_of(page):
    return html.unescape(re.sub(r"<[^>]+>", "", page))


def test_nothing_is_fetched_from_other_hosts(site):
    pages = [*site.rglob("*.html")]
    assert len(pages) > 50
    for page in pages:
        assert FETCHED.search(page.read_text()) is None, page
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", style.read_text()), style


def test_the_reference_has_every_public_name_and_every_command(site):
    for part in (name for name in dtk.__all__ if name[0] != "_"):
        found = getattr(dtk, part)
        name = f"dtk.{part}" if inspect.ismodule(found) else "dtk"
        page = (site / "reference" / f"{name}.html").read_text()
        headings = {text_of(one).replace("¶", " ").split()[0] for one in H2.findall(page)}
        listed = found.__all__ if inspect.ismodule(found) else [part]
        wanted = {one for one in listed if not inspect.ismodule(getattr(found, one, None))}
        assert wanted <= headings, f"{name} without {wanted - headings}"
    commands = text_of((site / "reference" / "commands.html").read_text())
    for name in COMMANDS:
        assert f"Usage: dtk {name} " in commands


def test_pictures_are_drawn_and_links_between_folders_lead_on(site):
    page = (site / "docs" / "architecture.html").read_text()
    assert page.count('<ol class="way">') == 5 and "<b>CutEpochIterator</b>" in page
    started = (site / "docs" / "command-line.html").read_text()
    assert 'href="../SECURITY.html#what-to-do"' in started
    assert (site / "examples" / "notebook.ipynb").is_file()


def test_search_works_in_pages_that_are_opened_from_disk(site):
    """Browsers open neither folders nor workers there, and read no JSON."""
    index = json.loads((site / "search" / "search_index.js").read_text().partition("=")[2])
    titles = {one["location"]: one["title"] for one in index["docs"]}
    assert not any(place.partition("#")[0].endswith("/") for place in titles)
    for words in ("early stopping", "class weights", "mixed precision"):
        assert any(words in html.unescape(title).lower() for title in titles.values()), words
    assert '<script src="iframe-worker.js"></script>' in (site / "index.html").read_text()
    assert "window.Worker =" in (site / "iframe-worker.js").read_text()


def test_what_comes_first_can_be_pasted_and_fits_its_box(site):
    """Two programs stood beside each other, which nobody could copy."""
    boxes = re.compile(r'<div class="highlight"><pre>.*?</pre>', re.DOTALL)
    shown = [text_of(one) for one in boxes.findall((site / "index.html").read_text())]
    (program,) = [one for one in shown if one.startswith("import dtk  # 1")]
    compile(program, "README.md", "exec")
    assert max(map(len, [*shown[0].splitlines(), *program.splitlines()])) < 80
