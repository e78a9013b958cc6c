"""`dtk doctor`: what is installed, what is broken, and the command that mends it.

TensorFlow, Keras and Horovod are imported in subprocesses: if one is broken, the table says so, and
the doctor does not crash.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import platform
import shutil
import socket
import sys

import click
import psutil
import rich.console
import rich.markup
import rich.table

from dtk import cluster, communicators
from dtk.cluster import mpi_installs
from dtk.cluster.variables import COMMUNICATOR
from dtk.errors import ClusterError
from dtk.horovod_build import reduction_check
from dtk.horovod_build.build import HorovodBuildError, ask
from dtk.launch.network import rules
from dtk.version import __version__, is_tested, pip_install, requirement

OK, NOTE, BROKEN = "ok", "note", "broken"
_STYLES = {OK: "green", NOTE: "yellow", BROKEN: "bold red"}

_LIBRARIES = """
import json
found = {}
try:
    import tensorflow as tf
    found["tensorflow"] = tf.__version__
    found["gpus"] = [gpu.name for gpu in tf.config.list_physical_devices("GPU")]
except Exception as error:
    found["tensorflow_error"] = f"{type(error).__name__}: {error}"
try:
    import keras
    found["keras"] = keras.__version__
    found["backend"] = keras.backend.backend()
except Exception as error:
    found["keras_error"] = f"{type(error).__name__}: {error}"
"""
_PRIVATE_NAMES = """
if found.get("backend") == "tensorflow":
    try:
        import dtk.compat
    except ImportError as error:
        found["names_error"] = str(error)
"""
_TELL = """
print(json.dumps(found))
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str  # the thing examined
    found: str  # its version or state, or the problem and the next command
    state: str = OK  # "ok", "note" (an optional part is missing) or "broken"


@click.command("doctor")
@click.option("--hosts", default="", metavar="H1,H2", help="Also try to reach these hosts.")
@click.option("--port", default=22, show_default=True, help="Port to try on them; 22 is ssh.")
@click.option(
    "--firewall",
    is_flag=True,
    help="Only print rules for nftables that let only --hosts reach the ports of jobs.",
)
def doctor(hosts: str, port: int, firewall: bool) -> None:
    """Report what dtk finds here; exit with 1 if something needed is broken."""
    try:
        names = [host.name for host in cluster.parse_hosts(hosts)] if hosts.strip() else []
    except ClusterError as error:
        raise click.UsageError(str(error)) from error
    if firewall:
        print_rules(names)
        return
    with rich.console.Console(stderr=True).status("importing TensorFlow and Horovod ..."):
        findings = examine()
        findings += [*reach(names, port), *between(names)]
    show(findings)
    broken = [finding.what for finding in findings if finding.state == BROKEN]
    if broken:
        raise click.ClickException(f"broken: {', '.join(broken)}")


def print_rules(hosts: list[str]) -> None:
    """Print a firewall's rules for these hosts."""
    if not hosts:
        raise click.UsageError("--firewall needs the hosts of the job: --hosts node1,node2")
    try:
        click.echo(rules(hosts), nl=False)
    except ClusterError as error:
        raise click.UsageError(str(error)) from error


def examine() -> list[Finding]:
    """Examine everything on this machine."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked_libraries = pool.submit(libraries)
        asked_horovod = pool.submit(horovod)
        asked_mpi = pool.submit(mpi4py)
        here = environment()
        return [
            Finding("dtk", __version__),
            Finding("Python", f"{platform.python_version()} ({sys.executable})"),
            *asked_libraries.result(),
            with_need(asked_horovod.result(), here[0]),
            asked_mpi.result(),
            mpirun(),
            joined_by(),
            isolation(),
            own_name(),
            cores(),
            *here[1],
        ]


def libraries() -> list[Finding]:
    """Import TensorFlow and Keras in a subprocess; list the GPUs that TensorFlow sees."""
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    probe = ask([sys.executable, "-c", _LIBRARIES + _PRIVATE_NAMES + _TELL], environ=quiet)
    if probe.returncode:  # died without an exception, by a signal for example
        lines = probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"]
        return [Finding("TensorFlow", f"importing it ends Python: {lines[-1]}", BROKEN)]
    answer = json.loads(probe.stdout.strip().splitlines()[-1])
    if "tensorflow_error" in answer:
        found = f"{answer['tensorflow_error']}. Next: pip install '{requirement('tensorflow')}'"
        return [Finding("TensorFlow", found, BROKEN)]
    gpus = answer["gpus"]
    findings = [
        tested("TensorFlow", answer["tensorflow"]),
        Finding("GPUs", ", ".join(gpus) if gpus else "none that TensorFlow sees"),
    ]
    if "keras_error" in answer:
        found = f"{answer['keras_error']}. Next: pip install '{requirement('keras')}'"
        return [*findings, Finding("Keras", found, BROKEN)]
    if answer["backend"] != "tensorflow":
        found = (
            f"{answer['keras']} on the {answer['backend']} backend, dtk needs tensorflow. "
            "Next: export KERAS_BACKEND=tensorflow"
        )
        return [*findings, Finding("Keras", found, BROKEN)]
    findings.append(tested("Keras", answer["keras"]))
    if "names_error" in answer:
        findings.append(Finding("Private names", answer["names_error"], BROKEN))
    return findings


def tested(what: str, found: str) -> Finding:
    """Return the version of TensorFlow or Keras, and whether dtk was tested with it."""
    package = what.lower()
    if is_tested(package, found):
        return Finding(what, found)
    cure = f"{found}, which dtk was not tested with. Next: pip install '{requirement(package)}'"
    return Finding(what, cure, BROKEN)


def horovod() -> Finding:
    """Import Horovod, which is optional, in a subprocess; return what it was built with."""
    try:
        return Finding("Horovod", str(reduction_check.installed()))
    except HorovodBuildError as error:
        missing = "not installed" in str(error)
        return Finding("Horovod", str(error), NOTE if missing else BROKEN)


def mpi4py() -> Finding:
    """Load MPI by mpi4py, which is optional, in a subprocess; return the library's name."""
    if not communicators.mpi_installed():
        return Finding("MPI (mpi4py)", f"not installed. Next: {pip_install('mpi')}", NOTE)
    # Do not initialize MPI: inside an MPI job this process would become a part of the job.
    script = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    script += "print(MPI.Get_library_version().splitlines()[0])"
    probe = ask([sys.executable, "-c", script])
    lines = (probe.stdout if probe.returncode == 0 else probe.stderr).strip().splitlines()
    said = lines[-1] if lines else f"exit code {probe.returncode}"
    if probe.returncode:
        return Finding("MPI (mpi4py)", f"{said}. Next: {pip_install('mpi')}", BROKEN)
    return Finding("MPI (mpi4py)", said.partition(", package")[0])


def joined_by() -> Finding:
    """Return the transport by which `dtk run` joins all-reduce ranks, and the reason."""
    told = os.environ.get(COMMUNICATOR)
    if told:
        return Finding("dtk run", f"joins ranks by {told}: {COMMUNICATOR} says so")
    path = mpi_installs.mpirun()
    if path is None:
        found = f"joins ranks by TensorFlow's collectives. Faster: {pip_install('mpi')}"
        return Finding("dtk run", found, NOTE)
    return Finding("dtk run", f"joins ranks by MPI: mpi4py is there, and {path}")


def isolation() -> Finding:
    """Return which hosts can reach a job's ports on this machine; try `--isolate`."""
    what = "Ports"
    if not any(name != "lo" for _, name in socket.if_nameindex()):
        return Finding(what, "this machine has only loopback: other hosts cannot reach a job")
    open_to = "TensorFlow's gRPC listens on every interface of this machine, without a password"
    script = "from dtk.launch.network import isolate; isolate()"
    probe = ask([sys.executable, "-c", script])
    if probe.returncode == 0:
        return Finding(what, f"{open_to}; `dtk run --isolate` keeps a job to itself")
    lines = probe.stderr.strip().splitlines()
    why = lines[-1].rpartition("--isolate: ")[2] if lines else f"exit code {probe.returncode}"
    return Finding(what, f"{open_to}; `dtk run --isolate` does not work here: {why}", NOTE)


def own_name() -> Finding:
    """Return the address of this host's own name."""
    name, what = socket.gethostname(), "Own name"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        found = f"{name} means no address ({error}). Next: add it to /etc/hosts"
        return Finding(what, found, NOTE)
    if address.startswith("127."):
        found = f"{name} means {address}, where no other host reaches it: a job on several hosts "
        found += "over a Horovod that was not built by `dtk install-horovod` is refused"
        return Finding(what, found, NOTE)
    return Finding(what, f"{name} means {address}")


def between(hosts: list[str]) -> list[Finding]:
    """Return which hosts can reach a job's ports on these hosts, and how to close them."""
    if not hosts:
        return []
    found = "open to every machine that can reach these hosts, without a password; "
    found += f"`dtk doctor --hosts {','.join(hosts)} --firewall` prints rules that close them"
    return [Finding("Ports of jobs on hosts", found)]


def environment() -> tuple[str, list[Finding]]:
    """Return the launcher's kind, and findings on this process's rank and communicator."""
    try:
        here = cluster.detect()
    except ClusterError as error:
        return "", [Finding("Cluster", str(error), BROKEN)]
    place = f"{here.kind}, {here.role} rank {here.rank} of {here.size}: {here.reason}"
    told = os.environ.get(COMMUNICATOR)
    choice = (
        communicators.Choice(told, f"{COMMUNICATOR} says so")
        if told
        else communicators.choose(here)
    )
    joined = Finding("Communicator", f"{choice.name}: {choice.why}")
    return here.kind, [Finding("Cluster", place), *([joined] if here.size > 1 else [])]


def with_need(found: Finding, kind: str) -> Finding:
    """Make missing Horovod an error under horovodrun, or under mpirun without mpi4py."""
    needed = kind == "horovod" or (kind == "mpi" and not communicators.mpi_installed())
    if found.state == NOTE and needed:
        return dataclasses.replace(found, state=BROKEN)
    return found


def mpirun() -> Finding:
    """Find mpirun and its version."""
    path = shutil.which("mpirun")
    if path is None:
        found = f"not found. Next: {pip_install('mpi')}, or apt-get install openmpi-bin"
        return Finding("mpirun", found, NOTE)
    first = (ask([path, "--version"]).stdout.strip().splitlines() or ["version unknown"])[0]
    other = mpi_installs.find_other("mpirun")
    if communicators.horovod_installed() and other != path:
        found = f"{first} ({path}), under which Horovod does not load; scripts that import it: "
        return Finding("mpirun", f"{found}`{other or 'the mpirun of its MPI'} -np 2 ...`", NOTE)
    return Finding("mpirun", f"{first} ({path})")


def cores() -> Finding:
    """Count the cores that this process may use; a container or Slurm can limit them."""
    usable, all_cores = len(os.sched_getaffinity(0)), psutil.cpu_count() or 1
    memory = psutil.virtual_memory().total / 2**30
    limited = f" of {all_cores}" if usable < all_cores else ""
    return Finding("Cores", f"{usable}{limited}, {memory:.0f} GiB of memory")


def reach(hosts: list[str], port: int) -> list[Finding]:
    """Try a TCP connection to every host at once, three seconds each."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=32) as pool:
        return list(pool.map(lambda host: reach_one(host, port), hosts))


def reach_one(name: str, port: int) -> Finding:
    """Try one host."""
    what = f"Host {name}"
    if port == 22 and name in ("localhost", "127.0.0.1", socket.gethostname()):
        return Finding(what, "this machine, needs no ssh")
    try:
        with socket.create_connection((name, port), timeout=3) as link:
            return Finding(what, f"reached {link.getpeername()[0]} on port {port}")
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(what, f"port {port}: {reason}. Next: ssh -v -p {port} {name}", BROKEN)


def show(findings: list[Finding]) -> None:
    """Print a table on a terminal, aligned plain lines elsewhere."""
    console = rich.console.Console()
    if not console.is_terminal or _in_a_job():
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            click.echo(f"{finding.state:<6}  {finding.what:<{width}}  {finding.found}")
        return
    table = rich.table.Table("", "what", "found", box=None)
    for finding in findings:
        state = f"[{_STYLES[finding.state]}]{finding.state}[/]"
        table.add_row(state, finding.what, rich.markup.escape(finding.found))
    console.print(table)


def _in_a_job() -> bool:
    """Return whether a launcher has started this process, such as mpirun with terminals."""
    try:
        return cluster.detect().size > 1
    except ClusterError:
        return True
