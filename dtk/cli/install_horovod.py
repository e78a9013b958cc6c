"""`dtk install-horovod`: build Horovod for the installed TensorFlow, install it, prove it works."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
import time
from collections.abc import Iterator

import click
import rich.console

from dtk import cache
from dtk.errors import DtkError
from dtk.horovod_build import build, reduction_check
from dtk.horovod_build.build import HOROVOD_VERSION, HorovodBuildError

PLAN = f"""\
This builds Horovod {HOROVOD_VERSION} for the TensorFlow that is installed here:
  1. look for the compiler, MPI and TensorFlow it needs
  2. download its source from the package index (3.5 MB), unless --sdist names it
  3. change what no longer compiles or loads: dtk/horovod_build/horovod-{HOROVOD_VERSION}.patch
  4. build a wheel (about two minutes on two cores) and keep it in {{cache}}
  5. install it into this Python environment, with {", ".join(build.RUNTIME_REQUIREMENTS)}
  6. let two processes reduce over {{over}} and check what each one reads"""


@click.command("install-horovod")
@click.option("--without-mpi", is_flag=True, help="Build with Gloo only; needs no MPI.")
@click.option(
    "--sdist",
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    help="Use this source archive instead of downloading one.",
)
@click.option("--rebuild", is_flag=True, help="Build again even if the cache has a wheel.")
@click.option("--wheel-only", is_flag=True, help="Stop once the wheel is in the cache.")
@click.option("--check", is_flag=True, help="Build nothing; only check what is installed.")
@click.option("--verbose", is_flag=True, help="Show the output of every command that runs.")
def install_horovod(
    without_mpi: bool,
    sdist: pathlib.Path | None,
    rebuild: bool,
    wheel_only: bool,
    check: bool,
    verbose: bool,
) -> None:
    """Build, install and check Horovod.

    As published, Horovod does not compile against current TensorFlow. This command builds it
    with the changes that it needs, keeps the wheel for next time, and ends by letting two
    processes reduce.
    """
    try:
        if check:
            check_installed(without_mpi)
            return
        over = "Gloo" if without_mpi else "Gloo and MPI"
        click.echo(PLAN.format(cache=cache.folder() / "wheels", over=over))
        wheel = obtain_wheel(without_mpi, sdist, rebuild, verbose)
        if wheel_only:
            click.echo(f"wheel: {wheel}")
            click.echo("skipped: installing it, and the check (--wheel-only)")
            return
        install(wheel, verbose)
        check_installed(without_mpi)
    except DtkError as error:
        raise click.ClickException(str(error)) from error


def obtain_wheel(
    without_mpi: bool, sdist: pathlib.Path | None, rebuild: bool, verbose: bool
) -> pathlib.Path:
    """Return the cached wheel for this machine; build it first if there is none."""
    if sdist is not None:
        build.check_sdist(sdist)
    build.check_python()
    compiler = build.check_compiler()
    mpi = None if without_mpi else build.find_mpi()
    tensorflow = build.tensorflow_version()
    with_mpi = f"{mpi.vendor} {mpi.version}" if mpi else "no MPI (--without-mpi)"
    click.echo(f"found: TensorFlow {tensorflow}, {compiler}, {with_mpi}")
    if (gpus := build.told_of_gpus()) is not None:
        click.echo(gpus)
    folder = cache.folder() / "wheels" / build.cache_key(tensorflow, mpi)
    cached = build.cached_wheel(folder)
    if cached and not rebuild and sdist is None:
        click.echo(f"cached: {cached}\nskipped: download and build (--rebuild does them again)")
        return cached
    cmake = build.usable_cmake()
    fetched = "no cmake from 3.13 up to 4 here; fetching one with pip, for this build only"
    click.echo(f"found: {cmake}" if cmake else fetched)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    log.write_text("")
    with tempfile.TemporaryDirectory(prefix="dtk-horovod-") as scratch:
        one = build.Build(pathlib.Path(scratch), log, echo=verbose)
        with step("fetching the build tools", verbose):
            one.fetch_tools()
        if sdist is None:
            with step(f"downloading horovod {HOROVOD_VERSION}", verbose):
                sdist = one.fetch_source()
        source = one.unpack(sdist)
        with step(f"compiling (log: {log})", verbose):
            wheel = one.compile(source, mpi)
        return build.keep(wheel, folder)


def install(wheel: pathlib.Path, verbose: bool) -> None:
    """Install the wheel and what it imports into the running environment."""
    log = wheel.with_name("install.log")
    log.write_text("")
    # forced: the installed version may be the same, but built for another TensorFlow or MPI
    forced = ["--no-deps", "--force-reinstall", str(wheel)]
    with step(f"installing {wheel.name}", verbose):
        for what in (build.RUNTIME_REQUIREMENTS, forced):
            command, failed = [*build.PIP, "install", *what], f"{wheel.name} could not be installed"
            build.run_logged(log, verbose, command, failed)


def check_installed(without_mpi: bool) -> None:
    """Let two processes reduce over each transport that the installed Horovod was built with."""
    with step("importing Horovod"):
        horovod = reduction_check.installed()
    click.echo(f"Horovod {horovod}")
    if not (horovod.gloo or horovod.mpi):
        raise HorovodBuildError(
            "this Horovod can reduce over nothing. Next: dtk install-horovod --rebuild"
        )
    gloo = "Gloo", horovod.gloo, reduction_check.check_gloo
    for name, built, reduces in (gloo, ("MPI", horovod.mpi, reduction_check.check_mpi)):
        if name == "MPI" and without_mpi:
            click.echo("skipped: the check over MPI (--without-mpi)")
        elif not built:
            click.echo(f"skipped: the check over {name}, which this Horovod was built without")
        else:
            with step(f"two processes over {name}"):
                seconds = reduces()
            click.echo(f"checked: over {name}, ranks gave 1 and 2, both read 3 ({seconds:.0f} s)")


@contextlib.contextmanager
def step(what: str, verbose: bool = False) -> Iterator[None]:
    """Show what runs now: a spinner on a terminal, or a line elsewhere or with --verbose."""
    console = rich.console.Console(stderr=True)
    started = time.monotonic()
    if console.is_terminal and not verbose:
        with console.status(f"{what} ..."):
            yield
        return
    click.echo(f"{what} ...")
    yield
    if (seconds := time.monotonic() - started) > 5:
        click.echo(f"  took {seconds:.0f} s")
