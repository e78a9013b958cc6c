"""The `dtk` command: one subcommand per file, imported only when it is called."""

from __future__ import annotations

import errno
import importlib
import sys

import click

from dtk.version import __version__

# name: (module, one-line help). The help is here so that `dtk --help` imports nothing. The function
# in the module has the name of the command, with "_" for "-".
COMMANDS = {
    "run": ("dtk.cli.run", "Start a script on N processes, here or on several hosts."),
    "top": ("dtk.cli.top", "Show the jobs that run here, and what their ranks do."),
    "migrate": ("dtk.cli.migrate", "Move a script of Keras, Horovod or tf.distribute to dtk."),
    "config": ("dtk.cli.config", "Ask for a job's hosts, workers and more, and write them down."),
    "check": ("dtk.cli.check", "Try a script's training step on a few rows, on 2 processes."),
    "tune": ("dtk.cli.tune", "Measure a script's fastest settings, which `dtk run` then uses."),
    "bench": ("dtk.cli.bench", "Measure training on N workers against the limit."),
    "plan": ("dtk.cli.planner", "Predict time, efficiency and cost on more workers than you have."),
    "doctor": ("dtk.cli.doctor", "Say what works on this machine, and what to do about the rest."),
    "env": ("dtk.cli.env", "Print versions and settings, for a bug report."),
    "install-horovod": ("dtk.cli.install_horovod", "Build and install Horovod, and check it."),
}


_FULL = (errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC)  # of a disk, or what is none


class LazyGroup(click.Group):
    """A group that imports a subcommand when it is called."""

    def invoke(self, ctx: click.Context) -> object:
        """Run a command, and say in a line that a disk is full, or which file cannot be had."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno not in _FULL and error.filename is None:
                raise
            what = error.filename or "what it prints or writes"
            message = f"dtk {ctx.invoked_subcommand}: {what}: {error.strerror}"
            print(message, file=sys.stderr)
            ctx.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command; None if there is none with this name."""
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that was called."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            import difflib  # takes a millisecond, only after a typing error

            close = " or ".join(difflib.get_close_matches(name, COMMANDS, n=2))
            message = f"no such command: {name}" + (f", did you mean {close}?" if close else "")
            raise click.UsageError(message, ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, told) for name, (_, told) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`dtk COMMAND --help` says more about one command.",
)
@click.version_option(__version__, prog_name="dtk")
def main() -> None:
    """Distributed training for Keras 3 on TensorFlow."""


if __name__ == "__main__":
    main(prog_name="dtk")
