"""Options of `dtk run` that a file gives, under the names that they have on the command line.

command line  >  environment  >  --config FILE  >  [tool.dtk.run] of ./pyproject.toml
"""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path

import click
from click.core import ParameterSource

from dtk.cluster.variables import COMMUNICATOR

PYPROJECT = "pyproject.toml"
# By the name of click's type: the types of a value in the file, and what an error calls them.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "integer": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "boolean": ((bool,), "true or false"),
    "text": ((str,), "a string"),
    "path": ((str,), "a string"),
}
_PLACES = ("hosts", "hostfile")  # one replaces the other
_FILES = "dtk.launch.job_file"  # in `ctx.meta`: the file of each option


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Return the options that a file may give, by the names that they have there."""
    return {
        name.removeprefix("--"): one
        for one in command.params
        if isinstance(one, click.Option) and not one.is_eager
        for name in one.opts
        if name.startswith("--")
    }


def read(file: str, command: click.Command) -> dict[str, object]:
    """Return the options in a file, or in the table `tool.dtk.run` of a pyproject.toml.

    Raises:
        UsageError: The file cannot be read, or has an unknown name or a wrong type.
    """
    try:
        table: object = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise click.UsageError(f"{file} is not TOML: {error}") from None
    options = options_of(command)
    if Path(file).name == PYPROJECT:
        for name in ("tool", "dtk"):
            table = table.get(name, {}) if isinstance(table, dict) else {}
        table = _known(table, ("run",), file).get("run", {})
    values = _known(table, options, file)
    for name, value in values.items():
        types, wanted = _KINDS[options[name].type.name]
        if type(value) not in types:
            raise click.UsageError(f"{file}: {name} = {value!r}: expected {wanted}")
    return values


def _known(table: object, names: Collection[str], file: str) -> dict[str, object]:
    """Return a table of a file, after a look at its names."""
    if not isinstance(table, dict):
        raise click.UsageError(f"{file}: {table!r}: expected a table of options")
    for name in table:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            cure = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(names)}"
            raise click.UsageError(f"{file}: unknown name {name}, {cure}")
    return table


def apply(ctx: click.Context, parameter: click.Parameter, file: str | None) -> str | None:
    """Make the files' options the command's defaults."""
    file = _expanded(ctx, parameter, file)
    defaults: dict[str, object] = {}
    ctx.meta[_FILES] = files = dict[str, str]()
    for one in (PYPROJECT if os.path.exists(PYPROJECT) else None, file):
        if one is None or ctx.resilient_parsing:
            continue
        values = read(one, ctx.command)
        for name in _PLACES if values.keys() & set(_PLACES) else ():
            defaults.pop(name, None)
        for name, value in values.items():
            option = str(options_of(ctx.command)[name].name)
            defaults[option], files[option] = value, one
    if os.environ.get(COMMUNICATOR):
        defaults.pop("communicator", None)
    ctx.default_map = defaults
    return file


def _expanded(ctx: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """Put the home directory in the place of ~: shells leave that of `--option=~/folder`.

    An empty path, such as of a shell's variable that is not set, is none.
    """
    return os.path.expanduser(path) if path else None


path_option = functools.partial(click.option, metavar="FILE", type=click.Path(), callback=_expanded)

option = path_option(
    "--config",
    is_eager=True,
    expose_value=False,
    callback=apply,
    help="TOML file with options of this command, such as `workers = 4`; `dtk config` writes one. "
    f"They win over those in [tool.dtk.run] of a {PYPROJECT} in this directory.",
)


def drop_replaced(ctx: click.Context) -> None:
    """Drop the hosts of a file where the command line has a hostfile, and the reverse."""
    names = sources(ctx).keys() & {*_PLACES}
    if len(names) == 1 and None not in (ctx.params[name] for name in _PLACES):
        (name,) = names
        ctx.params[name] = None
        del ctx.meta[_FILES][name]


def sources(ctx: click.Context) -> dict[str, str]:
    """Return the file of each option whose value is a file's."""
    files: Mapping[str, str] = ctx.meta.get(_FILES, {})
    by_file = ParameterSource.DEFAULT_MAP
    return {name: file for name, file in files.items() if ctx.get_parameter_source(name) is by_file}


def told(ctx: click.Context) -> str:
    """Return which options are from which file, as a part of a sentence; "" if none is."""
    files, said = sources(ctx), []
    for file in dict.fromkeys(files.values()):
        names = [name for name in files if files[name] == file]
        given = [f"{name.replace('_', '-')} = {ctx.params[name]}" for name in names]
        said.append(f"{file} gives {', '.join(given)}")
    return "; ".join(said)
