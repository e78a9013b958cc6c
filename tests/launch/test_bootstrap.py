"""What the launcher has Python run before a rank's script."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.command

BESIDE = "import os; print('own', os.environ.get('PYTHONPATH'))"
RANK = """
import os, subprocess, sys, threading
print([one for one in sys.path if "bootstrap" in one], os.environ.get("PYTHONPATH"))
print([one for one in sys.meta_path if "importing" in type(one).__module__] != [])
import dtk
print(sorted(one.name for one in threading.enumerate()))
print(sorted(one.name for one in sys.meta_path if "importing" in type(one).__module__))
code = "import sys; print(sys.path.count('') , [m for m in sys.modules if m == 'dtk_importing'])"
sys.stdout.flush()
subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_a_rank_begins_with_its_import_of_dtk_and_leaves_no_trace(tmp_path):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(BESIDE)
    (tmp_path / "train.py").write_text(RANK)
    path = f"{tmp_path / 'hidden'}:{':'.join(one for one in sys.path if one)}"
    done = subprocess.run(
        [sys.executable, "-m", "dtk.cli.main", "run", "-n", "1", str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path},
        timeout=60,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"own {path}",  # the launcher's own
        f"[0] own {path}",
        f"[0] [] {path}",
        "[0] True",
        "[0] ['MainThread', 'dtk-progress']",
        "[0] ['keras', 'tensorflow']",
        f"[0] own {path}",
        "[0] 1 []",
    ]


def test_a_script_that_knows_nothing_of_dtk_does_not_train_alone_on_each_rank(tmp_path):
    said = "class Model:\n    def fit(self): print('trained')\n    train_on_batch = fit\n"
    (tmp_path / "elsewhere").mkdir()
    # A stand-in, which is quick to import.
    (tmp_path / "elsewhere" / "keras.py").write_text(said)
    again = "import os, sys\nif sys.argv[1:]: os.execlp(sys.executable, 'python', sys.argv[0])\n"
    trains = again + "import keras\nkeras.Model.name = 'm'\nkeras.Model().fit()\n"
    (tmp_path / "train.py").write_text(trains)
    command = [sys.executable, "-m", "dtk.cli.main", "run", "-n"]
    env = {"PYTHONPATH": ":".join([str(tmp_path / "elsewhere"), *(one for one in sys.path if one)])}
    one, two, replaced = (
        subprocess.run(
            [*command, *ranks],
            capture_output=True,
            text=True,
            env=env,
            cwd=tmp_path,
            timeout=60,
        )
        for ranks in (["1", "train.py"], ["2", "train.py"], ["2", "train.py", "again"])
    )
    assert (one.stdout, one.stderr, one.returncode) == ("[0] trained\n", "", 0)
    for many in (two, replaced):
        assert "trained" not in many.stdout and many.returncode == 1
        assert "each would train a model of its own. Make `strategy = " in many.stderr
