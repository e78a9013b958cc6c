"""`dtk install-horovod` without a build: what it refuses, what it keeps, what its check catches.

TensorFlow and Horovod are stand-ins of a few lines, found through PYTHONPATH; compilers are the
machine's own, or absent because PATH says so.
"""

from __future__ import annotations

import io
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile

import pytest
from click.testing import CliRunner

from dtk.cli.install_horovod import install_horovod
from dtk.cluster import mpi_installs
from dtk.horovod_build import build, reduction_check
from dtk.horovod_build.build import HorovodBuildError, Mpi

pytestmark = pytest.mark.command

TENSORFLOW = "__version__ = '{version}'\ndef constant(x): return x\n"
HOROVOD = """
import os
{reduce}
Sum = "sum"
def init(): pass
def shutdown(): pass
def rank(): return int(os.environ["HOROVOD_RANK"])
def size(): return int(os.environ["HOROVOD_SIZE"])
def mpi_built(): return False
def gloo_built(): return True
def nccl_built(): return False
def mpi_enabled(): return False
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Make importable modules from sources; TensorFlow 2.21.0 to begin with."""
    folder = tmp_path / "python"
    here = str(pathlib.Path(build.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), here]))

    def write(path: str, text: str) -> None:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("tensorflow/__init__.py", TENSORFLOW.format(version="2.21.0"))
    return write


@pytest.fixture
def only(tmp_path, monkeypatch):
    """Leave nothing on PATH but links to the tools named, and scripts of one's own."""

    def narrow(*tools: str, **scripts: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        for tool in tools:
            path = shutil.which(tool)
            if path is None:
                pytest.skip(f"{tool} is not installed")
            (folder / tool).symlink_to(path)
        for name, text in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))

    return narrow


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HOROVOD_GPU_OPERATIONS", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "dtk" / "wheels"


def run(*arguments: str):
    return CliRunner().invoke(install_horovod, arguments)


def wheel(folder: pathlib.Path, library: str = "horovod/tensorflow/mpi_lib.so") -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(library, "machine code")
    return path


# As in the published source: two functions, and the change is for the second.
GLOO = """
void GlooContext::Initialize() {
  attr device_attr;
  device_attr.iface = gloo_iface_;
}

void GlooContext::InitializeForProcessSet(const GlooContext& global_context) {
    LOG(DEBUG) << "rendezvous server address: " << rendezvous_addr_env;
  } else {
    LOG(DEBUG) << "no rendezvous server provided, assuming single process execution";
  }

  attr device_attr;
  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
}
"""
FORWARD = """
#define gpuMemsetAsync hipMemsetAsync
#endif // HAVE_CUDA, HAVE_ROCM

// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#else
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
#endif // HAVE_GPU

// Undef LOG macro from TensorFlow
"""
FIRST = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")\n'
XLA = FIRST.replace("mpi_ops", "xla_mpi_ops")
CMAKE = f"\n# TF SOURCES\n{FIRST}{XLA}\n# Create library\nset_output_dir()\n"


def sdist(
    path: pathlib.Path,
    version: str = "0.28.1",
    cmake: str = CMAKE,
    gloo: str = GLOO,
    setup: str = "",
) -> pathlib.Path:
    files = {"PKG-INFO": f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\n"}
    files |= {"horovod/tensorflow/CMakeLists.txt": cmake}
    files |= {"horovod/common/gloo/gloo_context.cc": gloo}
    files |= {"horovod/tensorflow/mpi_ops.cc": FORWARD}
    if setup:
        files["setup.py"] = setup
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"horovod-{version}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


# --- what is missing ---


MISSING = {
    "no compiler": ("", {}, "C++ compiler g++ is not on PATH. Next: apt-get install g++"),
    "a compiler that fails": (
        "make",
        {"g++": "echo 'no such standard: c++17' >&2; exit 1"},
        "g++ cannot compile C++17 (no such standard: c++17)",
    ),
    "no make": ("g++ as ld", {}, "make is not on PATH. Next: apt-get install make"),
    "no mpicxx": ("g++ as make", {"mpirun": "exit 0"}, "mpicxx, which compiles against"),
    "no mpirun": ("g++ as make", {"mpicxx": "exit 0"}, "mpirun, which starts the"),
    "no header": (
        "g++ as make",
        {"mpicxx": 'exec g++ "$@"', "mpirun": "exit 0"},
        "mpicxx cannot read mpi.h (",
    ),
}


@pytest.mark.parametrize(("tools", "scripts", "said"), MISSING.values(), ids=MISSING)
def test_what_is_missing_is_said_with_the_cure(only, cache, tools, scripts, said):
    only(*tools.split(), **scripts)
    result = run()
    assert result.exit_code == 1 and str(cache) in result.output
    assert result.output.index("This builds Horovod 0.28.1") < result.output.index(said)
    if said.startswith("mpi"):
        assert "apt-get install libopenmpi-dev openmpi-bin" in result.output
        assert "--without-mpi" in result.output


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("dtk openmpi 5 0 3", Mpi("openmpi", "5.0.3")), ('dtk mpich "4.2.1"', Mpi("mpich", "4.2.1"))],
)
def test_mpi_versions_are_read(only, answer, expected):
    if shutil.which("mpicxx"):
        assert build.find_mpi().vendor in ("openmpi", "mpich", "mpi")
    only(mpicxx=f"echo '{answer}'", mpirun="exit 0")
    assert build.find_mpi() == expected


def test_python_and_tensorflow_that_are_old_or_broken(fake, monkeypatch):
    for source, said in (
        (TENSORFLOW.format(version="2.3.0"), r"TensorFlow 2\.3\.0 is too old: need 2\.21"),
        ("raise ImportError('no libcudart.so')", r"no libcudart.so.*pip install 'tensorf"),
    ):
        fake("tensorflow/__init__.py", source)
        with pytest.raises(HorovodBuildError, match=said):
            build.tensorflow_version()
    for name, value, said in (
        ("PIP", (sys.executable, "-m", "no_such_pip"), "has no pip.*-m ensurepip"),
        ("MIN_PYTHON", (99, 0), "too old: dtk needs 3.11"),
    ):
        monkeypatch.setattr(build, name, value)
        with pytest.raises(HorovodBuildError, match=said):
            build.check_python()


def test_cmake_must_fit(only, tmp_path):
    only(cmake=f'read -r version < {tmp_path}/version; echo "cmake version $version"')
    fits = {"3.12.9": False, "3.13.0": True, "3.31.10": True, "4.1.0": False}
    for version, usable in fits.items():
        (tmp_path / "version").write_text(f"{version}\n")
        assert (build.usable_cmake() is not None) == usable


def test_no_cmake_and_no_package_index(only, fake, monkeypatch, tmp_path):
    only("g++", "as", "make")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    result = run("--without-mpi")
    assert "no cmake from 3.13 up to 4 here; fetching one" in result.output
    assert "build tools could not be fetched" in result.output
    assert "apt-get install cmake" in result.output
    assert "build.log):" in result.output  # names the log and shows its end
    assert "No matching distribution found for setuptools==" in result.output
    assert result.exit_code == 1


# --- the source -----------------------------------------------------------------------------------


def test_an_sdist_of_another_version_or_none(tmp_path):
    other = sdist(tmp_path / "h.tar.gz", version="0.27.0")
    text = tmp_path / "text.tar.gz"
    text.write_text("404 not found")
    for file, said, code in (
        (other, "holds horovod 0.27.0, expected horovod 0.28.1", 1),
        (text, "is not a source archive", 1),
        ("nowhere.tar.gz", "does not exist", 2),
    ):
        result = run("--sdist", str(file))
        assert said in result.output and result.exit_code == code


def test_nothing_runs_of_a_download_that_is_not_what_was_published(tmp_path, monkeypatch):
    """pip runs an archive's setup.py to read what it needs."""
    index, ran = tmp_path / "index", tmp_path / "ran"
    index.mkdir()
    sdist(index / "horovod-0.28.1.tar.gz", setup=f"open({str(ran)!r}, 'w')\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    making = build.Build(tmp_path / "scratch", tmp_path / "log")
    with pytest.raises(HorovodBuildError, match="what came is not the published source") as error:
        making.fetch_source()
    assert "DO NOT MATCH THE HASHES" in str(error.value)
    assert not ran.exists()


def test_the_source_is_changed_in_three_places(tmp_path):
    making = build.Build(tmp_path / "scratch", tmp_path / "log")
    source = making.unpack(sdist(tmp_path / "h.tar.gz"))
    assert (source / "horovod/tensorflow/CMakeLists.txt").read_text() == CMAKE.replace(XLA, "")
    given = "iface = gloo_iface_ = global_context.gloo_iface_;"
    changed = (source / "horovod/common/gloo/gloo_context.cc").read_text()
    assert changed == given.join(GLOO.rsplit("iface = gloo_iface_;", 1))
    ops = (source / "horovod/tensorflow/mpi_ops.cc").read_text()
    assert "AsGpuStreamValue(Stream* stream);" not in ops, "TensorFlow has no such function"
    assert ops.index("stream.h") < ops.index("stream->platform_specific_handle().stream")
    assert (source / "horovod/dtk_patches.py").read_text() == f"VERSION = {build.PATCH_VERSION}\n"


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({"gloo": GLOO.replace("gloo_iface_", "interface")}, 0),
        ({"cmake": CMAKE.replace("xla_", "")}, 0),
        ({"cmake": CMAKE * 2}, 2),
    ],
)
def test_refuses_a_source_that_no_change_fits_in_one_place(tmp_path, changed, count):
    making = build.Build(tmp_path / "scratch", tmp_path / "log")
    with pytest.raises(HorovodBuildError, match=f"has {count} places .*, expected 1: this is not"):
        making.unpack(sdist(tmp_path / "h.tar.gz", **changed))


def test_failure_names_the_log_and_shows_its_end(tmp_path):
    log = tmp_path / "build.log"
    code = "print('early'); [print('line', n) for n in range(50)]; raise SystemExit(3)"
    with pytest.raises(HorovodBuildError) as error:
        build.run_logged(log, False, [sys.executable, "-c", code], "Horovod did not compile")
    said = str(error.value)
    assert said.startswith("Horovod did not compile\n") and str(log) in said
    assert "line 49" in said and "early" not in said and "early" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_build_that_is_told_to_end_leaves_no_compiler(tmp_path, number):
    log = tmp_path / "log"
    told = "from dtk.horovod_build import build; import pathlib, sys; "
    told += "build.run_logged(pathlib.Path(sys.argv[1]), True, ['sh', '-c', sys.argv[2]], 'failed')"
    compiler = "sleep 60 & echo $!; wait"
    with subprocess.Popen(
        [sys.executable, "-c", told, log, compiler], stdout=subprocess.PIPE, text=True
    ) as builder:
        pid = int(builder.stdout.readline())
        builder.send_signal(number)
        assert builder.wait(20)
    deadline = time.monotonic() + 10
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(pid)


def runs(pid):
    """Whether a process runs, and is not only waiting for its parent to hear of its end."""
    stat = pathlib.Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def activated(tmp_path, monkeypatch):
    """An environment with keras-dtk[mpi], activated, whose tools all fail; a system's that work."""
    own, system = tmp_path / "own", tmp_path / "system"
    for folder, code in ((own, "exit 9"), (system, "echo 'dtk openmpi 4 1 4'")):
        folder.mkdir()
        for tool in ("mpicxx", "mpirun"):
            (folder / tool).write_text(f"#!/bin/sh\n{code}\n")
            (folder / tool).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setattr(mpi_installs, "mpirun", lambda: own / "mpirun")
    monkeypatch.setenv("PATH", f"{own}:{system}")
    return own, system


def test_horovod_is_built_and_checked_with_the_mpi_of_the_system(activated, tmp_path, monkeypatch):
    own, system = activated
    monkeypatch.setenv("HOROVOD_WITH_MPI", "1")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert build.find_mpi() == Mpi("openmpi", "4.1.4")
    environ = {**build.Build(tmp_path, tmp_path / "log").environ(), **build.build_variables(None)}
    path = environ["PATH"].split(":")
    assert str(own) not in path and str(system) in path and path[0] == f"{tmp_path}/tools/bin"
    assert environ["PYTHONPATH"] == f"{tmp_path}/tools:/mine"
    assert environ["HOROVOD_WITHOUT_MPI"] == "1" and "HOROVOD_WITH_MPI" not in environ
    started = []
    monkeypatch.setattr(
        reduction_check, "_both_read_three", lambda name, ranks, *_, **__: started.extend(ranks)
    )
    reduction_check.check_mpi()
    assert started[0].argv[0] == str(system / "mpirun")
    (system / "mpicxx").unlink()
    with pytest.raises(HorovodBuildError, match=r"not on PATH \(that of keras-dtk\[mpi\] is an"):
        build.find_mpi()


# --- the cache ------------------------------------------------------------------------------------


def test_key_differs_with_all_that_is_compiled_in(monkeypatch):
    mpis = [None, Mpi("openmpi", "4.1.4"), Mpi("openmpi", "5.0.3"), Mpi("mpich", "4.1.4")]
    keys = {build.cache_key("2.22.0", None), *(build.cache_key("2.21.0", mpi) for mpi in mpis)}
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    keys.add(build.cache_key("2.21.0", None))
    assert len(keys) == 6
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for key in keys:
        assert key.startswith(f"horovod-0.28.1-dtk{build.PATCH_VERSION}-{python}-tf2.2")
        assert "/" not in key and " " not in key


@pytest.mark.parametrize("from_wheels", [False, True])
def test_a_horovod_for_gpus_is_built_where_cuda_and_nccl_are(tmp_path, monkeypatch, from_wheels):
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "HOROVOD_NCCL_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build, "_TOOLKIT", str(tmp_path / "nothing"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")  # a driver is here
    assert build.gpu_switches() == {}
    assert "install nvidia-cuda-nvcc" in build.told_of_gpus()
    site = tmp_path / "site" / "nvidia"
    cuda, nccl = site / "cu13" if from_wheels else tmp_path / "cuda", site / "nccl"
    libraries = [nccl / "lib" / "libnccl.so.2"]
    if from_wheels:
        libraries.append(cuda / "lib" / "libcudart.so.13")
    else:
        monkeypatch.setenv("CUDA_HOME", str(cuda))
    for file in (cuda / "bin" / "nvcc", nccl / "include" / "nccl.h", *libraries):
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    given = {}
    one = build.Build(tmp_path, tmp_path / "log")
    one.run = lambda command, failed, env: given.update(env)
    (tmp_path / "wheel").mkdir()
    with pytest.raises(StopIteration):  # nothing was built
        one.compile(tmp_path, None)
    assert given["HOROVOD_GPU_OPERATIONS"] == "NCCL" and given["HOROVOD_NCCL_LINK"] == "SHARED"
    assert (given["HOROVOD_CUDA_HOME"], given["HOROVOD_NCCL_HOME"]) == (str(cuda), str(nccl))
    links = pathlib.Path(given["HOROVOD_NCCL_LIB"])
    found = {link.name: link.resolve() for link in links.iterdir()}
    names = ("libnccl.so", "libcudart.so")
    assert found == {name: one.resolve() for name, one in zip(names, libraries, strict=False)}
    folders = [str(library.parent) for library in libraries]
    assert given["LDFLAGS"].split() == [f"-Wl,-rpath,{folder}" for folder in folders]
    assert given["LIBRARY_PATH"].split(":") == folders
    assert given["CMAKE_LIBRARY_PATH"] == str(links)
    assert "nccl" in build.cache_key("2.21.0", None)
    assert build.told_of_gpus() == f"found: CUDA in {cuda}, NCCL in {nccl}: GPUs will sum by NCCL"
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "")
    assert build.gpu_switches() == {"HOROVOD_GPU_OPERATIONS": ""}, "the user decides"


def test_broken_wheels_are_not_taken_from_the_cache(tmp_path):
    assert build.cached_wheel(tmp_path / "nothing") is None
    whole = wheel(tmp_path)
    assert build.cached_wheel(tmp_path) == whole
    whole.write_bytes(whole.read_bytes()[:20])
    assert build.cached_wheel(tmp_path) is None
    wheel(tmp_path, library="horovod/torch/mpi_lib.so")
    assert build.cached_wheel(tmp_path) is None


def test_cached_wheel_is_used_and_the_skipping_is_said(only, fake, cache):
    only("g++", "as", "make")
    kept = build.keep(wheel(cache / "built"), cache / build.cache_key("2.21.0", None))
    result = run("--without-mpi", "--wheel-only")
    assert result.exit_code == 0, result.output
    assert f"cached: {kept}" in result.output
    assert "skipped: download and build" in result.output
    assert "skipped: installing it, and the check" in result.output


# --- the check ------------------------------------------------------------------------------------


def fake_horovod(fake, reduce: str, built_for: str = "2.21.0") -> None:
    """Replace what the ranks import; the rendezvous between them is Horovod's own."""
    pytest.importorskip("horovod.runner.http.http_server")
    fake("horovod/__init__.py", "__version__ = '0.28.1'")
    fake("horovod/metadata.json", f'{{"tensorflow": "{built_for}"}}')
    fake("horovod/tensorflow/__init__.py", HOROVOD.format(reduce=reduce))


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("raise ImportError(\"No module named 'horovod'\")", "Horovod is not installed. Next: dtk"),
        ("raise ImportError('undefined symbol: x')", "cannot be imported (ImportError: undefined"),
    ],
)
def test_check_of_a_horovod_that_does_not_load(fake, package, said):
    fake("horovod/__init__.py", package)
    result = run("--check")
    assert said in result.output and result.exit_code == 1


@pytest.mark.parametrize(
    ("reduce", "built_for", "said"),
    [
        ("", "2.20.0", "built for TensorFlow 2.20.0, but 2.21.0 is installed"),
        ("return x", "2.21.0", "over Gloo read {0: 1.0, 1: 2.0}, expected 3 on both"),
        ("return 3.0 if rank() else 1 / 0", "2.21.0", "a process over Gloo failed"),
    ],
)
def test_check_catches_a_horovod_that_is_of_no_use(fake, reduce, built_for, said):
    fake_horovod(fake, f"def allreduce(x, op): {reduce or 'pass'}", built_for)
    result = run("--check")
    assert said in result.output and result.exit_code == 1
    assert ("ZeroDivisionError" in result.output) == ("1 / 0" in reduce)


def test_check_gives_up_on_ranks_that_hang(fake):
    fake_horovod(fake, "import time\ndef allreduce(x, op): time.sleep(600)")
    with pytest.raises(HorovodBuildError, match="over Gloo did not finish within 2 s"):
        reduction_check.check_gloo(timeout=2)


def test_check_says_what_it_skipped(fake):
    fake_horovod(fake, "def allreduce(x, op): return 3.0")
    result = run("--check")
    assert "skipped: the check over MPI, which this Horovod was built without" in result.output
    result = run("--check", "--without-mpi")
    assert "skipped: the check over MPI (--without-mpi)" in result.output
    assert result.exit_code == 0


@pytest.mark.full("a whole command: one of each kind")
def test_installed_horovod_really_reduces():
    try:
        reduction_check.installed()
    except HorovodBuildError as error:
        if "not installed" in str(error) and os.environ.get("DTK_REQUIRE_HOROVOD") != "1":
            pytest.skip(str(error))
        raise
    command = [sys.executable, "-c"]
    command += ["from dtk.cli.install_horovod import install_horovod as f; f(['--check'])"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "both read 3" in done.stdout
