"""Names, calls, options, commands, paths and links in the documentation's text are still true."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re

import pytest

from dtk.cli.main import COMMANDS

from documents import checking, preambles
from support.blocks import FILES, ROOT, blocks_in, links_in, spans_in

PAGES = [pytest.param(file, id=str(file.relative_to(ROOT))) for file in FILES]
PARTS = "callbacks data errors exchange inference layers optimizers schedules search strategies"
MODULES = [importlib.import_module(f"dtk.{name}") for name in PARTS.split()]
# What calls in the text belong to, where it is not dtk's to promise.
FOREIGN = {"keras", "print", "tf", "BatchNormalization", "model", "cluster_spec"}
FOREIGN |= {"communicator"}  # its contract has a suite of its own
FOREIGN |= {"RDBStorage", "UnitNorm", "LogitsDistillation"}
# Ray's, and what needs it: tests/engines has their calls.
FOREIGN |= {"ray", "dataset", "DataConfig", "ScalingConfig", "CheckpointConfig", "KerasTrainer"}
# TensorFlow's method of a name that dtk has, too.
THEIR_CALLS = {"dataset.shard"}
# Files a reader has, not the repository.
THEIRS = {"train.py", "job.toml", "evaluation.csv"}
# Options of other programs.
OTHERS = {"--map-by", "--bind-to", "--allow-run-as-root"}


def calls_in(file):
    """Calls that stand in a page as code: their text and the first call of each."""
    for span in spans_in(file.read_text()):
        try:
            node = ast.parse(span, mode="eval").body
        except SyntaxError:
            continue
        calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
        # shard(...).map(...): the innermost on the left is the one that is called first.
        firsts = [c for c in calls if not any(isinstance(n, ast.Call) for n in ast.walk(c.func))]
        yield from ((span, call) for call in firsts)


def found(name):
    """What a dotted name in the documentation may stand for; nothing if it is not dtk's."""
    root, _, rest = name.partition(".")
    if root == "dtk":
        target = importlib.import_module("dtk")
        for part in rest.split("."):
            if inspect.ismodule(target) and not hasattr(target, part):  # of an engine
                importlib.import_module(f"{target.__name__}.{part}")
            target = getattr(target, part)
        return [target]
    if root == "strategy":
        strategies = importlib.import_module("dtk.strategies")
        return [getattr(strategies.AllReduceStrategy, rest.partition(".")[0])]
    # Not hasattr: names that are deprecated are not what the documentation means.
    listed = [module for module in MODULES if root in {*vars(module), *dir(module)}]
    if of_modules := [getattr(module, root) for module in listed]:
        return of_modules
    classes = [one for module in MODULES for one in vars(module).values() if inspect.isclass(one)]
    return [getattr(one, root) for one in classes if root in vars(one)]


@pytest.mark.parametrize("file", PAGES)
def test_calls_take_these_arguments(file):
    for span, call in calls_in(file):
        name = ast.unparse(call.func)
        if name in THEIR_CALLS:
            continue
        targets = found(name)
        if not targets:
            assert name.partition(".")[0] in FOREIGN, f"`{span}`: dtk has no {name}"
            continue
        named = [keyword.arg for keyword in call.keywords]
        if any(isinstance(one, ast.Constant) and one.value is ... for one in call.args):
            continue
        refused = [refusal_of(target, len(call.args), named) for target in targets]
        assert None in refused, f"`{span}`: {refused[0]}"


def refusal_of(target, positional, named):
    """What is wrong with a call of so many positional, and these named arguments; None if not."""
    signature = inspect.signature(target)
    of_an_object = next(iter(signature.parameters), None) == "self"
    try:
        signature.bind(*[None] * (positional + of_an_object), **dict.fromkeys(named))
    except TypeError as error:
        return f"{error}; it takes {signature}"
    return None


@pytest.mark.parametrize("file", PAGES)
def test_dotted_names_are_there(file):
    for span in spans_in(file.read_text()):
        for name in re.findall(r"(?<!tool\.)\bdtk\.[a-z_]+(?:\.\w+)*", span):
            module = re.fullmatch(r"dtk\.exchange\.factors|dtk\.strategies\.\w+", name)
            assert module or found(name), f"`{span}`"


@pytest.mark.parametrize("file", PAGES)
def test_commands_are_what_their_programs_take(file, tmp_path):
    (tmp_path / "train.py").write_text(preambles.TRAIN)
    (tmp_path / "job.toml").write_text(preambles.JOB)
    for span in spans_in(file.read_text()):
        first, *rest = span.split()
        if first == "dtk" and all(word.startswith("--") for word in rest[1:]):
            assert rest[0] == "--help" or rest[0] in COMMANDS, span  # only spoken of
        elif first in ("dtk", "make", "mpirun", "srun") or span.startswith(
            ("python benchmarks/", "python docs/", "python examples/")
        ):
            checking.checked(span, str(tmp_path))


def known_options():
    """Every option of dtk's commands, of the benchmarks and of the examples."""
    options = set(OTHERS)
    for name, (module, _) in COMMANDS.items():
        command = getattr(importlib.import_module(module), name.replace("-", "_"))
        for parameter in command.params:
            options.update(parameter.opts + parameter.secondary_opts)
    folders = [(ROOT / "benchmarks").rglob("*.py"), (ROOT / "examples").rglob("*.py")]
    for file in itertools.chain(*folders, (ROOT / "tests").glob("*/__main__.py")):
        options.update(re.findall(r'add_argument\(\s*(?:"-\w", )?"(--[\w-]+)"', file.read_text()))
    return options


@pytest.mark.parametrize("file", PAGES)
def test_options_are_there(file):
    known = known_options()
    for span in spans_in(file.read_text()):
        if span.startswith(("--", "dtk ")):
            scripted = span.partition(".py")[0] + " "
            for option in re.findall(r"(?<=\s)--[\w-]+", " " + scripted):
                assert option in known or option == "--help", f"`{span}`"


@pytest.mark.parametrize("file", PAGES)
def test_files_that_are_named_are_there(file):
    for span in spans_in(file.read_text()):
        if (
            re.fullmatch(r"[\w./-]*\w\.(py|md|cfg|toml|csv)|\w[\w/-]*/", span)
            and span not in THEIRS
        ):
            whole = (ROOT / span).exists()
            assert whole or any((ROOT / "dtk").rglob(span.rstrip("/"))), f"there is no {span}"


# A path as CONTRIBUTING.md and the architecture's page name it: from the root, or in a room.
A_PATH = re.compile(r"\.?\w[\w-]*(?:/[\w.-]+)*/?|\.[\w-]+(?:[/.][\w-]+)*/?")
MADE = [".venv"]  # by make


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_paths_in_backticks_exist(page):
    """Stricter than the test above: also hidden files, and paths without an ending."""
    for span in spans_in((ROOT / page).read_text()):
        path = span.partition("::")[0]
        if ("/" in path or path.startswith(".")) and A_PATH.fullmatch(path):
            inside = any((ROOT / "dtk").rglob(path.rstrip("/")))
            assert inside or (ROOT / path).exists() or path in MADE, f"{page}: there is no {path}"


def names_in(path):
    """What the modules of a file or folder define: names, and those of classes with their class."""
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            if isinstance(node, ast.ClassDef):
                members = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
                yield from (f"{node.name}.{member}" for member in members)


A_LINE = re.compile(r"\s+(?P<path>\w+(?:/\w+)*(?:\.py|/))\s+(?P<name>\w+(?:\.\w+)?)(?:\s|$)")


def test_what_pictures_name_is_defined_there():
    page = "docs/architecture.md"
    pictures = [b for b in blocks_in((ROOT / page).read_text(), page) if b.language == "text"]
    lines = [line for picture in pictures for line in picture.text.splitlines()]
    named = [found for line in lines if (found := A_LINE.match(line))]
    assert len(named) == len([line for line in lines if line.startswith(" ")]), "an odd line"
    missing = [
        f"{found['path']} {found['name']}"
        for found in named
        if found["name"] not in set(names_in(ROOT / "dtk" / found["path"]))
    ]
    assert missing == [], f"{page} names what is not there"


@pytest.mark.parametrize("file", PAGES)
def test_links_lead_somewhere(file):
    inside = (target for target in links_in(file.read_text()) if not target.startswith("https://"))
    for target in inside:
        path, _, heading = target.partition("#")
        page = file.parent / path if path else file
        assert page.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert heading in slugs, target


def test_every_example_is_in_the_readmes_table():
    listed = set(links_in((ROOT / "README.md").read_text()))
    examples = {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.[pi][yp]*")}
    assert examples <= listed


def test_what_is_to_be_read_at_once_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_tables_stand_by_themselves():
    """Breaks as a row of one table inside a list, which GitHub shows as text."""
    for file in FILES:
        lines = ["", *file.read_text().splitlines()]
        for number, line in enumerate(lines):
            if line.startswith("| ") and not lines[number - 1].startswith("|"):
                assert not lines[number - 1] and lines[number + 1].startswith("|--"), (
                    f"{file.name}:{number}: this row has no table around it"
                )
