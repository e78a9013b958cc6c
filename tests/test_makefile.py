"""What `make test` does about Debian packages, with an apt-get, an id and a sudo of our own."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAKE = shutil.which("make")
APT = "#!/bin/bash\necho apt-get $* >> $LOG\nexit ${FAILS:-0}\n"
SUDO = "#!/bin/bash\nshift\nexec $*\n"
ALL = "g++ make libopenmpi-dev openmpi-bin cmake"

pytestmark = [pytest.mark.command, pytest.mark.skipif(MAKE is None, reason="make is not installed")]


@pytest.mark.parametrize("target, searches", [("test", 0), ("test-fast", 0), ("test-all", 1)])
def test_only_test_all_searches_at_random(target, searches):
    asked = subprocess.run(
        [MAKE, "-n", "-f", str(ROOT / "Makefile"), target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.count("--hypothesis-profile search") == searches


@pytest.fixture
def make_apt(tmp_path):
    """Run `make apt` where none of the wanted commands is there, and others as given."""

    def run(user, fails=0, **commands):
        binaries = tmp_path / "bin"
        binaries.mkdir()
        (tmp_path / ".venv").mkdir()
        for tool in ("bash", "tail", "true"):
            (binaries / tool).symlink_to(shutil.which(tool))
        for name, text in {"id": f"#!/bin/bash\necho {user}\n", **commands}.items():
            (binaries / name.replace("_", "-")).write_text(text)
            (binaries / name.replace("_", "-")).chmod(0o755)
        log = tmp_path / "log"
        log.touch()
        done = subprocess.run(
            [MAKE, "-f", str(ROOT / "Makefile"), "apt"],
            cwd=tmp_path,
            env={"PATH": str(binaries), "LOG": str(log), "FAILS": str(fails)},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, log.read_text()

    return run


@pytest.mark.parametrize("user, commands", [(0, {}), (1000, {"sudo": SUDO})])
def test_packages_are_installed_where_that_is_allowed(make_apt, user, commands):
    said, asked = make_apt(user, apt_get=APT, **commands)
    assert said.startswith(f"Installing {ALL}")
    update, install = asked.splitlines()
    assert update == "apt-get -qq update"
    assert install.startswith("apt-get -qq install -y --no-install-recommends")
    assert ALL in install


def test_without_the_right_to_it_says_what_root_must_do(make_apt):
    said, asked = make_apt(1000, apt_get=APT)
    assert f"only root can install it: sudo apt-get install {ALL}" in said
    assert asked == ""


def test_without_apt_get_it_names_the_packages(make_apt):
    said, _ = make_apt(0)
    assert said.startswith(f"missing: {ALL}")
    assert "no apt-get, install them by hand" in said


def test_a_failing_apt_get_is_told_and_the_rest_goes_on(make_apt):
    said, _ = make_apt(0, fails=100, apt_get=APT)
    assert "apt-get failed, .venv/apt.log says why" in said


@pytest.mark.parametrize("before", [True, False])
def test_an_environment_with_the_name_that_dtk_had_loses_that_record(tmp_path, before):
    binaries, site = tmp_path / ".venv/bin", tmp_path / ".venv/lib/python3.11/site-packages"
    binaries.mkdir(parents=True)
    (site / ("dtk-0.1.0.dist-info" if before else "keras_dtk-0.1.0.dist-info")).mkdir(parents=True)
    (binaries / "python").write_text("#!/bin/bash\necho $* >> log\n")
    (binaries / "python").chmod(0o755)
    for name in ("setup.cfg", "pyproject.toml"):
        (tmp_path / name).touch()
    made = [MAKE, "-f", str(ROOT / "Makefile"), ".venv/.for-demo"]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True, timeout=30)
    asked = (tmp_path / "log").read_text().splitlines()
    assert [line for line in asked if "uninstall" in line] == (
        ["-m pip --log .venv/pip.log uninstall -qq -y dtk"] if before else []
    )
    assert asked[-1].endswith("-e .[examples,mpi]")
