"""`dtk migrate`: a script of Keras, Horovod or tf.distribute, in dtk's names."""

from __future__ import annotations

import difflib
import shlex
import stat
import sys
from pathlib import Path

import click
import rich.console
import rich.text

from dtk.files import written
from dtk.version import pip_install

_STYLES = {"+": "green", "-": "red", "@": "cyan"}


@click.command(
    epilog="""
    \b
    dtk migrate train.py > train.patch
    dtk migrate --write train.py
    """
)
@click.option("--write", is_flag=True, help="Change SCRIPT, in place of printing the difference.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def migrate(script: Path, write: bool) -> None:
    """Move SCRIPT to dtk: print what changes as a unified diff.

    SCRIPT trains by plain Keras, Horovod or tf.distribute. What is not understood stays as it is,
    below a comment `# dtk migrate: ...`, and is listed on standard error with its line in the
    migrated script. Nothing is run.

    The exit code is 0 if everything was migrated, 1 if something is left to you, and 2 if SCRIPT
    cannot be read, or dtk has a fault; then nothing is written.
    """
    try:
        from dtk.migrate import script as scripts
    except ImportError as error:
        raise click.ClickException(
            f"`dtk migrate` needs libcst, which is not installed ({error}); run "
            f"`{pip_install('migrate')}`"
        ) from error
    text = script.read_bytes()
    try:
        migration = scripts.migrate(text)
    except (SyntaxError, RuntimeError) as error:
        message = f": {error}"
        if isinstance(error, SyntaxError):
            message = f":{error.lineno or 1}:{error.offset or 1}: {error.msg}"
        click.echo(f"dtk migrate: {script}{message}; nothing was changed", err=True)
        sys.exit(2)
    if migration.refusal:
        click.echo(f"dtk migrate: {script} is unchanged: {migration.refusal}", err=True)
    elif write:
        _replace(script, migration.text)
        click.echo(f"dtk migrate: {script} is migrated", err=True)
    else:
        _print(script, text, migration.text)
    for note in migration.notes:
        click.echo(f"dtk migrate: {note}", err=True)
    for line, why in migration.marks:
        click.echo(f"{script}:{line}: left to you: {why}", err=True)
    if not migration.refusal or migration.is_done:
        name = shlex.quote(str(script))
        served = "--ps 1 " * (b"ParameterServerStrategy" in migration.text)
        before = "" if write or migration.is_done else f"`dtk migrate --write {name}`, then "
        click.echo(f"Next: {before}`dtk check {name}` and `dtk run -n 2 {served}{name}`", err=True)
    sys.exit(bool(migration.marks) or bool(migration.refusal and not migration.is_done))


def _replace(script: Path, text: bytes) -> None:
    """Write the script, whole or not at all, with the mode that it has."""
    file = script.resolve()
    mode = stat.S_IMODE(file.stat().st_mode)
    with written(file) as draft:
        draft.write_bytes(text)
        draft.chmod(mode)


def _print(script: Path, before: bytes, after: bytes) -> None:
    """Print the difference, in colours on a terminal."""
    old, new = (text.decode("utf-8", "replace").splitlines(True) for text in (before, after))
    console = rich.console.Console()
    for line in difflib.unified_diff(old, new, str(script), str(script)):
        line = line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        if console.is_terminal:
            console.print(rich.text.Text(line, style=_STYLES.get(line[0], "")), end="")
        else:
            click.echo(line, nl=False)
