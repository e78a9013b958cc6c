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
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import click
import psutil
import rich.console
import rich.markup
import rich.table

from dtk import cluster, communicators, version
from dtk.cluster import alone, mpi_installs
from dtk.cluster.place import DRIVER, has_gpu
from dtk.cluster.variables import COMMUNICATOR, JOB_SECRET
from dtk.errors import ClusterError
from dtk.horovod_build import reduction_check
from dtk.horovod_build.build import HorovodBuildError, ask, probe
from dtk.launch.network import rules
from dtk.version import DISTRIBUTION, __version__, is_tested, pip_install, requirement

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
_GPUS = """
if "gpus" in found:
    import ctypes, importlib.util
    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    found["gpus"] = [one["device_name"] for one in details]
    found["capabilities"] = [one["compute_capability"] for one in details]
    built = tf.sysconfig.get_build_info()
    found["cuda"], found["cudnn"] = built["cuda_version"], built["cudnn_version"]
    found["kinds"] = [int(one.split("_")[1]) for one in built["cuda_compute_capabilities"]]
    wheel = importlib.util.find_spec("nvidia")
    places = [] if wheel is None else wheel.submodule_search_locations
    for folder in ["", *(f"{one}/nccl/lib/" for one in places)]:
        try:
            version = ctypes.c_int()
            ctypes.CDLL(f"{folder}libnccl.so.2").ncclGetVersion(ctypes.byref(version))
            found["nccl"] = version.value
        except OSError:
            pass
"""
_PRIVATE_NAMES = """
if found.get("backend") == "tensorflow":
    try:
        import dtk.compat
    except ImportError as error:
        found["names_error"] = str(error)
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
        if firewall and not names:
            raise click.UsageError("--firewall needs the hosts of the job: --hosts node1,node2")
        if firewall:
            click.echo(rules(names), nl=False)
            return
    except ClusterError as error:
        raise click.UsageError(str(error)) from error
    with rich.console.Console(stderr=True).status("importing TensorFlow and Horovod ..."):
        findings = [*examine(), *reach(names, port), *between(names)]
    show(findings)
    broken = [finding.what for finding in findings if finding.state == BROKEN]
    if broken:
        raise click.ClickException(f"broken: {', '.join(broken)}")


def examine() -> list[Finding]:
    """Examine everything on this machine."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = [pool.submit(horovod), pool.submit(mpi4py)]
        imported = pool.submit(libraries)
        kind, here = environment()
        found_horovod, found_mpi = (one.result() for one in asked)
        return [
            own_install(),
            Finding("Python", f"{platform.python_version()} ({sys.executable})"),
            *imported.result(),
            with_need(found_horovod, kind),
            found_mpi,
            mpirun(),
            joined_by(),
            isolation(),
            own_name(),
            cores(),
            *here,
        ]


def own_install() -> Finding:
    """Return which distribution the dtk that runs belongs to, and what else has its name."""
    place = Path(version.__file__).parent.resolve()
    others = version.installations()
    owners = others.pop(place, {})
    message = f"{' and '.join(owners.values()) or f'{__version__}, not installed'}, in {place}"
    problems = []
    if len(owners) > 1:
        cure = f"pip uninstall -y {' '.join(owners)}; pip install {DISTRIBUTION}"
        problems.append(f"both own its files. Next: {cure}")
    for folder, hidden in others.items():
        problems.append(f"it hides {' and '.join(hidden.values())} in {folder}: see PYTHONPATH")
    good, file = probe("import dtk; print(dtk.__file__)")
    if good and (package := Path(file).parent.resolve()) != place:
        problems.append(f"scripts in {os.getcwd()} import {package} instead. Next: rename that")
    return Finding("dtk", "; ".join([message, *problems]), NOTE if problems else OK)


def libraries() -> list[Finding]:
    """Import TensorFlow and Keras in a subprocess; list the GPUs that TensorFlow sees."""
    about_gpus = _GPUS if DRIVER.exists() else ""
    good, said = probe(f"{_LIBRARIES}{about_gpus}{_PRIVATE_NAMES}\nprint(json.dumps(found))")
    if not good:  # died without an exception, by a signal for example
        return [Finding("TensorFlow", f"importing it ends Python: {said}", BROKEN)]
    answer = json.loads(said)
    findings = [tested("TensorFlow", answer)]
    if "tensorflow_error" in answer:
        return findings
    findings += [*gpus(answer), tested("Keras", answer)]
    if answer.get("backend", "tensorflow") != "tensorflow":
        message = f"{answer['keras']} on the {answer['backend']} backend, dtk needs tensorflow. "
        message += "Next: export KERAS_BACKEND=tensorflow"
        findings[-1] = Finding("Keras", message, BROKEN)
    if "names_error" in answer:
        findings.append(Finding("Private names", answer["names_error"], BROKEN))
    return findings


class GPUAnswer(TypedDict, total=False):
    """TensorFlow's answer about GPUs; all but the names only where NVIDIA's driver is loaded."""

    tensorflow: str
    gpus: list[str]
    capabilities: list[tuple[int, int]]  # compute capability of each
    kinds: list[int]  # compute capabilities that TensorFlow was compiled for, times 10
    cuda: str
    cudnn: str
    nccl: int  # such as 22304 for 2.23.4; missing without NCCL


def gpus(answer: GPUAnswer) -> list[Finding]:
    """Return what TensorFlow and NVIDIA's driver say of the GPUs, and what cures what they lack."""
    cure = f"Next: pip install 'tensorflow[and-cuda]=={answer['tensorflow']}'"
    seen = answer["gpus"]
    if not DRIVER.exists():
        return [Finding("GPUs", ", ".join(seen) or "none that TensorFlow sees")]
    driver = re.search(r"Module +(?:for \S+ +)?([\d.]+)", DRIVER.read_text())
    findings = [Finding("NVIDIA's driver", driver[1] if driver else "of an unknown version")]
    if not seen:
        told = f"the driver is here, but TensorFlow sees none, for want of CUDA's libraries. {cure}"
        return [*findings, Finding("GPUs", told, BROKEN)]
    oldest, newest = min(answer["kinds"]) / 10, max(answer["kinds"]) / 10
    for place, (name, kind) in enumerate(zip(seen, answer["capabilities"], strict=True)):
        has = kind[0] + kind[1] / 10
        told, state = f"{name}, compute capability {has}", OK
        if has < oldest:
            told, state = f"{told}: too old for this TensorFlow, from {oldest}", BROKEN
        elif has > newest:
            told += f": newer than this TensorFlow's {newest}, so it compiles first"
            state = NOTE
        findings.append(Finding(f"GPU {place}", told, state))
    told = f"TensorFlow was built for CUDA {answer['cuda']} and cuDNN {answer['cudnn']}"
    findings.append(Finding("CUDA", told))
    if nccl := answer.get("nccl"):
        findings.append(Finding("NCCL", f"{nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}"))
    else:
        findings.append(Finding("NCCL", f"not found: gradients between GPUs need it. {cure}", NOTE))
    if len(seen) > 1:
        matrix = ask(["nvidia-smi", "topo", "-p2p", "r"]).stdout.partition("Legend")[0]
        apart = len(re.findall(r"\b(NS|CNS|GNS|TNS|DR)\b", matrix))
        told = "between all GPUs" if not apart else f"{apart} pairs of GPUs have none, and are slow"
        findings.append(Finding("P2P", told, NOTE if apart else OK))
    return findings


def tested(what: str, answer: Mapping[str, str]) -> Finding:
    """Return the version of TensorFlow or Keras, and whether dtk was tested with it."""
    package = what.lower()
    cure = f"Next: pip install '{requirement(package)}'"
    if f"{package}_error" in answer:
        return Finding(what, f"{answer[f'{package}_error']}. {cure}", BROKEN)
    if is_tested(package, answer[package]):
        return Finding(what, answer[package])
    return Finding(what, f"{answer[package]}, which dtk was not tested with. {cure}", BROKEN)


def horovod() -> Finding:
    """Import Horovod, which is optional, in a subprocess; return what it was built with."""
    try:
        return Finding("Horovod", str(reduction_check.installed()))
    except HorovodBuildError as error:
        missing = "not installed" in str(error)
        return Finding("Horovod", str(error), NOTE if missing else BROKEN)


def mpi4py() -> Finding:
    """Load MPI by mpi4py, which is optional, in a subprocess; return the library's name."""
    what, cure = "MPI (mpi4py)", f"Next: {pip_install('mpi')}"
    if not communicators.mpi_installed():
        return Finding(what, f"not installed. {cure}", NOTE)
    # Do not initialize MPI: inside an MPI job this process would become a part of the job.
    script = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    good, said = probe(script + "print(MPI.Get_library_version().splitlines()[0])")
    if not good:
        return Finding(what, f"{said}. {cure}", BROKEN)
    return Finding(what, said.partition(", package")[0])


def joined_by() -> Finding:
    """Return the transport by which `dtk run` joins all-reduce ranks, and the reason."""
    if told := os.environ.get(COMMUNICATOR):
        return Finding("dtk run", f"joins ranks by {told}: {COMMUNICATOR} says so")
    if path := mpi_installs.unasked():
        return Finding("dtk run", f"joins ranks by MPI: mpi4py is there, and {path}")
    if has_gpu():
        return Finding("dtk run", "joins ranks by TensorFlow's collectives, over NCCL on GPUs")
    message = f"joins ranks by TensorFlow's collectives. Faster: {pip_install('mpi')}"
    return Finding("dtk run", message, NOTE)


def isolation() -> Finding:
    """Return which hosts can reach a job's ports on this machine; try `--isolate`."""
    what = "Ports"
    if not any(name != "lo" for _, name in socket.if_nameindex()):
        return Finding(what, "this machine has only loopback: other hosts cannot reach a job")
    open_to = "TensorFlow's gRPC listens on every interface of this machine, without a password"
    good, said = probe("from dtk.launch.network import isolate; isolate()")
    if good:
        return Finding(what, f"{open_to}; `dtk run --isolate` keeps a job to itself")
    why = said.rpartition("--isolate: ")[2]
    return Finding(what, f"{open_to}; `dtk run --isolate` does not work here: {why}", NOTE)


def own_name() -> Finding:
    """Return the address of this host's own name."""
    name, what = socket.gethostname(), "Own name"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        message = f"{name} means no address ({error}). Next: add it to /etc/hosts"
        return Finding(what, message, NOTE)
    message = f"{name} means {address}"
    if not address.startswith("127."):
        return Finding(what, message)
    message += (
        ", where no other host reaches it: a job on several hosts over a Horovod that was not "
    )
    return Finding(what, f"{message}built by `dtk install-horovod` is refused", NOTE)


def between(hosts: list[str]) -> list[Finding]:
    """Return which hosts can reach a job's ports on these hosts, and how to close them."""
    if not hosts:
        return []
    message = "open to every machine that can reach these hosts, without a password; "
    message += f"`dtk doctor --hosts {','.join(hosts)} --firewall` prints rules that close them"
    return [Finding("Ports of jobs on hosts", message)]


def environment() -> tuple[str, list[Finding]]:
    """Return the launcher's kind, and findings on this process's rank and communicator."""
    try:
        here = cluster.detect()
    except ClusterError as error:
        return "", [Finding("Cluster", str(error), BROKEN)]
    place = f"{here.kind}, {here.role} rank {here.rank} of {here.size}: {here.reason}"
    idle = alone.idle_tasks(os.environ) if here.size == 1 else None
    findings = [Finding("Cluster", place), *([Finding("Alone", idle, NOTE)] if idle else [])]
    if here.meeting and not os.environ.get(JOB_SECRET):
        joins = f"whoever reaches {here.meeting} can join: no {JOB_SECRET} is set"
        findings.append(Finding("Meeting", joins, NOTE))
    if here.size > 1:
        told, choice = os.environ.get(COMMUNICATOR), communicators.choose(here)
        message = f"{told}: {COMMUNICATOR} says so" if told else f"{choice.name}: {choice.why}"
        findings.append(Finding("Communicator", message))
    return here.kind, findings


def with_need(finding: Finding, kind: str) -> Finding:
    """Make missing Horovod an error under horovodrun, or under mpirun without mpi4py."""
    needed = kind == "horovod" or (kind == "mpi" and not communicators.mpi_installed())
    return (
        dataclasses.replace(finding, state=BROKEN) if finding.state == NOTE and needed else finding
    )


def mpirun() -> Finding:
    """Find mpirun and its version."""
    path = shutil.which("mpirun")
    if path is None:
        message = f"not found. Next: {pip_install('mpi')}, or apt-get install openmpi-bin"
        return Finding("mpirun", message, NOTE)
    first = (ask([path, "--version"]).stdout.strip().splitlines() or ["version unknown"])[0]
    other = mpi_installs.find_other("mpirun")
    if communicators.horovod_installed() and other != path:
        message = f"{first} ({path}), under which Horovod does not load; scripts that import it: "
        return Finding("mpirun", f"{message}`{other or 'the mpirun of its MPI'} -np 2 ...`", NOTE)
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
