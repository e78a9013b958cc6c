"""TensorFlow and Keras are imported without the garbage collector, which then leaves them alone."""

import doctest
import gc
import os
import subprocess
import sys

import pytest

from dtk import importing
from dtk.launch.job_processes import bootstrapped

pytestmark = pytest.mark.command


@pytest.fixture(autouse=True)
def nothing_frozen():
    """Whatever was kept from the collector before the test is again, after it."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.freeze()


def test_what_exists_is_left_alone_and_what_comes_later_is_not():
    with importing.without_collector():
        assert not gc.isenabled()
        before = []
    assert gc.isenabled()
    after = []
    seen = {id(one) for one in gc.get_objects()}
    assert id(before) not in seen
    assert id(after) in seen


def test_a_failing_block_leaves_everything_as_it_was():
    with pytest.raises(ImportError), importing.without_collector():
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_script_that_collects_nothing_has_decided_for_itself():
    gc.disable()
    with importing.without_collector():
        pass
    assert not gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_examples():
    failed, tried = doctest.testmod(importing)
    assert tried and not failed


# A job of one process, started by `dtk run`.
ALONE = '{"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}'


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import dtk, keras", "[False, False] True True"),
        ("import dtk, tensorflow, keras", "[False, False] True True"),
        ("import dtk, tensorflow", "[False] True True"),
        ("import gc, dtk; gc.disable(); import keras", "[False, False] False False"),
        ("import keras, dtk", "[False, False] True True"),
    ],
)
def test_import_is_without_the_collector(tmp_path, script, expected):
    said = "import builtins, gc\nbuiltins.said = [*getattr(builtins, 'said', ()), gc.isenabled()]\n"
    (tmp_path / "keras.py").write_text(f"import tensorflow\n{said}")
    (tmp_path / "tensorflow.py").write_text(said)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{script}\nimport gc\nprint(said, gc.isenabled(), gc.get_freeze_count() > 0)",
        ],
        env=bootstrapped(
            {
                **os.environ,
                "DTK_RUN": "1",
                "TF_CONFIG": ALONE,
                "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()]),
            }
        ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == expected, done.stderr
