"""`dtk tune`: what is chosen, kept, applied and refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtk.cli.tune import AS_IT_COMES, Timing, TuneError, Tuning, ways
from dtk.cluster.variables import COMMUNICATOR, STEP_SETTINGS, TIME_STEPS
from dtk.launch import job_options, step_settings
from dtk.launch.step_settings import StepSettings

ONEDNN, PAGES, INTER = "TF_ENABLE_ONEDNN_OPTS", "GLIBC_TUNABLES", "TF_NUM_INTEROP_THREADS"
JIT, FUSED = "DTK_JIT_COMPILE", "DTK_FUSED_BATCH_NORM"
DECIDED = {JIT: "0", ONEDNN: "0", PAGES: "glibc.malloc.hugetlb=1", INTER: "1", FUSED: "1"}
THREADS = str(max(1, len(os.sched_getaffinity(0)) // 2))
SCRIPT = """
import dtk, keras, numpy as np
strategy = dtk.auto_strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="only")])
    model.compile("sgd", "mse")
class Epochs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise AssertionError("nothing is trained")
model.fit(np.ones((8, 4)), np.ones((8, 2)), batch_size=4, verbose=0, callbacks=[Epochs()])
"""


def dtk(*arguments, home, **environ):
    given = {**os.environ, "XDG_CACHE_HOME": str(home), **environ}
    return subprocess.run(
        [sys.executable, "-m", "dtk.cli.main", *arguments],
        capture_output=True,
        text=True,
        env=given,
        timeout=120,
    )


def tuned(cost, tried=None, deterministic=False, rounds=2):
    """Choose among ways of which each takes what `cost` says of its variables and its turn."""
    turns = iter(range(100))

    def measure(variables):
        return Timing(cost(variables, next(turns)), "a model", deterministic)

    found = Tuning(tried or ways(1, {}), measure, lambda name: None, rounds)
    return found.choose(), found


def alone(variables, _):
    return 100.0 - 20.0 * (variables.get(ONEDNN) == "1") - 10.0 * (INTER in variables)


@pytest.mark.parametrize(
    ("cost", "kept"),
    [
        (lambda variables, _: 60.0 if variables.get(ONEDNN) == "1" else 150.0, {ONEDNN: "1"}),
        # what is faster once only, or by less than 5 %, is noise
        (lambda variables, turn: 60.0 if variables and turn < 5 else 100.0, {}),
        (lambda variables, _: 96.0 if variables else 100.0, {}),
        # of two values of a variable the faster is kept
        (lambda variables, _: {None: 100, "1": 80, "0": 70}[variables.get(ONEDNN)], {ONEDNN: "0"}),
        # settings that win are measured together and kept only if that is faster
        (alone, {ONEDNN: "1", INTER: "2"}),
        (lambda these, _: 200.0 if len(these) > 1 else alone(these, 0), {ONEDNN: "1"}),
    ],
)
def test_what_is_faster_each_time_is_kept(cost, kept):
    best, found = tuned(cost)
    assert best == StepSettings(kept, "a model", cost(kept, 99), cost({}, 99))
    assert {len(times) for times in found.times.values()} == {2}


def test_a_way_in_which_the_script_fails_is_left_out():
    def cost(variables, turn):
        if JIT in variables and turn > 5:
            raise TuneError("XLA cannot")
        return 50.0 if JIT in variables else 100.0

    best, found = tuned(cost)
    assert best.variables == {}
    assert found.failed == {"XLA": "XLA cannot"} and "XLA" not in found.times
    with pytest.raises(TuneError, match="broken"):
        tuned(lambda variables, _: (_ for _ in ()).throw(TuneError("broken")))
    with pytest.raises(TuneError, match="op determinism"):
        tuned(lambda *_: 1.0, deterministic=True)


def test_what_changes_nothing_for_a_model_is_not_measured():
    measured = []

    def measure(variables):
        measured.append(dict(variables))
        return Timing(50.0 if variables else 100.0, "a model", False, idle)

    tried = {AS_IT_COMES: {}, "Keras's": {FUSED: "0"}}
    idle = [FUSED]
    assert Tuning(dict(tried), measure, lambda name: None).choose().variables == {}
    assert measured == [{}, {}]
    idle = []
    assert Tuning(dict(tried), measure, lambda name: None).choose().variables == {FUSED: "0"}


def test_ways_are_of_what_the_user_has_not_set_and_of_the_communicators_given():
    assert list(ways(2, DECIDED)) == [AS_IT_COMES]
    assert ways(2, {})["one more thread between operations"] == {INTER: "3"}
    found = ways(1, DECIDED, ["collective", "horovod"])
    assert found["over collective"] == {COMMUNICATOR: "collective"}
    assert found["over horovod"] == {COMMUNICATOR: "horovod"}
    asked = {**DECIDED, COMMUNICATOR: "mpi"}
    assert list(ways(1, asked, ["collective", "horovod"])) == [AS_IT_COMES]


OTHER = "horovod" if "horovod" in job_options.installed() else "collective"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A script, its command, and the file with its settings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (*DECIDED, COMMUNICATOR, STEP_SETTINGS, TIME_STEPS):
        monkeypatch.delenv(name, raising=False)
    script, names = tmp_path / "train.py", (ONEDNN, INTER, COMMUNICATOR)
    script.write_text(f"import os; print(*map(os.environ.get, {names}))")
    command = [sys.executable, str(script)]
    file = step_settings.file_of(command, THREADS)
    found = {ONEDNN: "1", INTER: "7", COMMUNICATOR: OTHER}
    step_settings.save(file, StepSettings(found, "a model", 60.0, 150.0))
    return script, command, file


def test_dtk_run_sets_what_was_kept_and_says_so(kept, tmp_path):
    script, _, file = kept
    first = job_options.installed()[0]
    done = dtk("run", "-n", "2", str(script), home=tmp_path)
    assert sorted(done.stdout.splitlines()) == [f"[0] 1 7 {OTHER}", f"[1] 1 7 {OTHER}"]
    settings = f"{ONEDNN}=1 {INTER}=7 {COMMUNICATOR}={OTHER}"
    assert done.stderr == f"dtk run: {settings}, as `dtk tune` has measured\n"
    # The user's own word counts, and 0 asks for none of it.
    named = ["-n", "2", "--communicator", "collective"]
    done = dtk("run", *named, str(script), home=tmp_path, **{INTER: "2"})
    assert "[0] 1 2 collective\n" in done.stdout and f"{INTER}=7" not in done.stderr
    done = dtk("run", "-n", "2", str(script), home=tmp_path, **{STEP_SETTINGS: "0"})
    assert re.search(rf"\[0\] None \d+ {first}", done.stdout) and done.stderr == ""
    # The communicator is that of one machine, and must be installed.
    done = dtk("run", "--hosts", "localhost:2", str(script), home=tmp_path)
    assert f"[0] 1 7 {first}" in done.stdout
    step_settings.save(file, StepSettings({COMMUNICATOR: "pigeon"}, "a model", 1.0, 2.0))
    done = dtk("run", "-n", "2", str(script), home=tmp_path)
    assert re.search(rf"\[0\] None \d+ {first}", done.stdout) and done.stderr == ""


def test_settings_of_another_script_thread_count_or_format_are_not_used(kept, tmp_path):
    script, command, file = kept
    env, more = {"OMP_NUM_THREADS": THREADS}, {"OMP_NUM_THREADS": "99"}
    assert step_settings.apply(command, env, {})[1] is not None
    assert step_settings.apply(command, more, {}) == (more, None)
    assert step_settings.apply([command[0], str(tmp_path / "other.py")], env, {}) == (env, None)
    for damage in ("", "[]", '{"format": 99}', '{"format": 1}', '{"format": 2}', "[" * 100_000):
        file.write_text(damage)
        assert step_settings.apply(command, env, {}) == (env, None)
    for told in ("forgotten\n", "there was nothing to forget\n"):
        done = dtk("tune", "--forget", str(script), home=tmp_path)
        assert (done.returncode, done.stdout) == (0, told)


def test_one_worker_and_no_round_are_refused(kept, tmp_path):
    for given, said in ((["-n", "1"], "-n 1: steps of one"), (["--rounds", "0"], "range x>=1")):
        done = dtk("tune", *given, str(kept[0]), home=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert said in done.stderr


@pytest.mark.full("a whole command: one of each kind")
def test_a_real_script_is_timed_over_every_communicator_and_trains_nothing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    open_still = {name: value for name, value in DECIDED.items() if name != FUSED}
    done = dtk("tune", "--rounds", "1", str(script), home=tmp_path, **open_still)
    assert done.returncode == 0, done.stderr
    rows = [line.partition("  ")[0] for line in done.stdout.splitlines()]
    others = [f"over {name}" for name in job_options.installed()[1:]]
    assert rows[1 : 2 + len(others)] == [AS_IT_COMES, *others]
    assert "batch norm" not in done.stdout and "the script fails" not in done.stdout
    assert "nothing is faster by 5 %" in done.stdout or "kept: " in done.stdout
    (file,) = Path(tmp_path, "dtk", "step-settings").iterdir()
    kept = json.loads(file.read_text())
    assert kept["model"] == "10 parameters, 2 rows of [(4,), (2,)]"
    assert 0 < kept["milliseconds"] < 10_000


@pytest.mark.full("a whole command: one of each kind")
def test_a_script_that_trains_nothing_is_named(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import dtk\ndtk.auto_strategy()\n")
    done = dtk("tune", "--rounds", "1", str(script), home=tmp_path, **DECIDED)
    assert done.returncode == 2
    assert "dtk tune: the script ended without training a model" in done.stderr


@pytest.mark.full("a whole command: one of each kind")
def test_settings_that_fit_otherwise_are_told_and_determinism_refuses_them(tmp_path):
    script = tmp_path / "train.py"
    # As `dtk run` would give them to its ranks.
    head = f"import os\nos.environ[{STEP_SETTINGS!r}] = 'a model'\n"
    script.write_text(head + SCRIPT.replace("callbacks=[Epochs()]", "epochs=1"))
    done = dtk("run", "-n", "2", str(script), home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "were measured with a model, and it has 10 parameters" in done.stderr
    strict = "import tensorflow as tf\ntf.config.experimental.enable_op_determinism()\n"
    seed = "keras.utils.set_random_seed(1)\nstrategy ="
    script.write_text(head + strict + SCRIPT.replace("strategy =", seed, 1))
    done = dtk("run", "-n", "2", str(script), home=tmp_path)
    assert done.returncode == 1
    assert "op determinism is on, but `dtk run` has set" in done.stderr


@pytest.mark.full("a whole command: one of each kind")
def test_ranks_with_other_kernels_are_refused(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os\nrank = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        f"os.environ[{ONEDNN!r}] = str(rank)\n" + SCRIPT
    )
    done = dtk("run", "-n", "2", str(script), home=tmp_path)
    assert done.returncode == 1
    assert f"variable {ONEDNN}" in done.stderr


@pytest.mark.full("a whole command: one of each kind")
def test_what_auto_is_where_xla_was_found_faster(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.split("class Epochs")[0] + "print(model.jit_compile)")
    for wished, compiled in (("1", "True"), ("0", "False")):
        done = dtk("run", "-n", "2", str(script), home=tmp_path, **{JIT: wished})
        assert sorted(done.stdout.splitlines()) == [f"[0] {compiled}", f"[1] {compiled}"]
