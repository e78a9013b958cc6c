"""`dtk bench` as a user meets it: two workers really train, and tables say what they measured."""

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys

import pytest
from click.testing import CliRunner

from dtk.bench import report
from dtk.bench import turns as bench_turns
from dtk.bench.bench_jobs import Places
from dtk.bench.results import BenchResults, Reading, Setting, read
from dtk.cli.main import main
from dtk.planning.calibration import calibrated

pytestmark = pytest.mark.command

SMALLEST = "transformer"
BLOCK = 3  # steps, of 2 workers with 2 rows each: more than a turn would otherwise have
VARIANTS = ["limit", "collective none", "collective 1bit", f"collective block:{4 * BLOCK}"]
STEPS, ROUNDS = 2, 2


def bench(folder, *options, **env):
    """Run it in a folder; return what it printed, and what it saved."""
    done = subprocess.run(
        [sys.executable, "-m", "dtk.cli.main", "bench", *options, "--json", "run.json"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.getcwd(), **env},
    )
    assert done.returncode == 0, done.stderr
    return done, json.loads((folder / "run.json").read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One small measurement, compared with a saved one in which every step took a second."""
    folder = tmp_path_factory.mktemp("bench")
    seconds = dict.fromkeys(VARIANTS, [[Reading(1.0, 0.0, 0.0, 1.0)]])
    setting = {"workers": 7, "batch_size": 1, "steps": 1, "rounds": 1, "ranks": []}
    setting |= {"versions": {"dtk": "0"}}
    BenchResults(setting, {}, {SMALLEST: seconds}).save(folder / "saved.json")
    options = ["--model", SMALLEST, "--communicator", "collective"]
    for variant in VARIANTS[1:]:
        options += ["--exchange", variant.split()[1]]
    options += ["--batch-size", "2", "--steps", str(STEPS), "--rounds", str(ROUNDS)]
    found = bench(folder, *options, "--markdown", "run.md", "--compare", "saved.json")
    return *found, (folder / "run.md").read_text()


def samples(found, variant, what):
    """Of every turn, the mean over ranks."""
    turns = found["turns"][SMALLEST][variant]
    return [statistics.mean(reading[what] for reading in turn) for turn in turns]


@pytest.mark.full("a whole command: one of each kind")
def test_every_turn_of_every_rank_is_saved_with_all_that_a_plan_needs(run, tmp_path):
    done, found, _ = run
    assert list(found["turns"][SMALLEST]) == VARIANTS
    for name, turns in found["turns"][SMALLEST].items():
        assert [len(turn) for turn in turns] == [2] * ROUNDS
        for reading in itertools.chain(*turns):
            steps = BLOCK if name == VARIANTS[3] else STEPS
            assert 0 < steps * reading["seconds"] < reading["fit"]
            assert sum(reading["steps"]) < reading["fit"]
    setting = found["setting"]
    given = {"workers": 2, "batch_size": 2, "steps": STEPS, "rounds": ROUNDS}
    given |= {"worlds": ["limit", "collective"], "communicators": ["collective"]}
    assert setting.items() >= given.items()
    ours, saved = done.stdout.splitlines()[-2:]
    cores = len(os.sched_getaffinity(0))
    assert f"({cores} cores), threads per worker: {setting['ranks'][0]['threads']}; batch 2" in ours
    assert "Saved: 7 workers" in saved
    (tmp_path / "run.json").write_text(json.dumps(found))
    known = calibrated(read(tmp_path / "run.json"))
    assert (known.job.rows, known.per_host, known.hosts) == (2, 2, 1)
    assert known.job.parameters == found["parameters"][SMALLEST]
    assert known.software.message > 0


@pytest.mark.full("a whole command: one of each kind")
def test_the_tables_say_what_the_samples_say(run):
    done, found, page = run
    limit = samples(found, "limit", "seconds")
    for variant in VARIANTS:
        seconds = samples(found, variant, "seconds")
        middle = statistics.median(seconds)
        share = statistics.median(samples(found, variant, "communicating"))
        of_the_bound = statistics.median(a / b for a, b in zip(limit, seconds, strict=True))
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{variant}  ")]
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {variant} |")]
        for text in (line, row):
            shown = f"{1000 * middle:.{report.digits(1000 * middle)}f}"
            assert f" {shown} (" in text
            assert f" {of_the_bound:.2f} " in text
            assert f" {100 * share:.0f} %" in text
            assert f" {1 / middle:.2f}" in text


@pytest.mark.full("a whole command: one of each kind")
def test_the_command_says_nothing_else(run):
    done, found, _ = run
    assert done.stderr == ""
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[0] == f"{SMALLEST}, {found['parameters'][SMALLEST] / 1e6:.2f} M parameters"
    shown = [VARIANTS[0], report.IN_STEP, *VARIANTS[1:]]
    assert [line.split("  ")[0] for line in lines[2:7]] == shown
    for first, size in ((7, "131.1 kB"), (11, "4.19 MB")):
        assert lines[first : first + 2] == ["", f"all-reduce of {size}"]
        assert lines[first + 3].startswith("collective allreduce ")
    assert lines[15] == ""
    assert lines[16].startswith("Medians over turns") and len(lines) == 19


@pytest.mark.full("a whole command: one of each kind")
def test_bytes_are_counted_and_codes_and_blocks_send_fewer(run):
    _, found, _ = run
    # the same in every turn
    (whole,), (coded,), (block,) = ({*samples(found, name, "sent")} for name in VARIANTS[1:])
    whole, coded, block = (
        sent / (4 * found["parameters"][SMALLEST]) for sent in (whole, coded, BLOCK * block)
    )
    assert 1.0 <= whole < 1.01 and 0 < coded < whole / 10
    assert 1.0 <= block < 1.01  # all weights in one of its steps
    assert {*samples(found, "limit", "sent"), *samples(found, "limit", "communicating")} == {0.0}
    assert all(0 < part < 1 for part in samples(found, "collective none", "communicating"))


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """All-reduces by dtk and by peers, one of which cannot be installed."""
    folder = tmp_path_factory.mktemp("sums")
    peers = ["--peer", "mpi4py", "--peer", "torch"]
    if importlib.util.find_spec("horovod"):
        peers += ["--peer", "horovod-loop"]
    options = ["--allreduce", "4kB", "--communicator", "collective", "--steps", "2", "--rounds=1"]
    # The package index is out of reach, and so is Open MPI; nor does what pip is told on this
    # machine count, such as constraints.
    none = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(folder)}
    return bench(folder, *peers, *options, XDG_CACHE_HOME=str(folder), PATH=str(folder), **none)


@pytest.mark.full("a whole command: one of each kind")
def test_a_peer_that_cannot_be_measured_is_named_and_the_rest_goes_on(sums):
    done, found = sums
    assert list(found["absent"]) == ["mpi4py", "torch"]
    assert found["absent"]["mpi4py"].startswith("no mpirun: install Debian's openmpi-bin")
    why = found["absent"]["torch"]
    assert why.startswith("its environment cannot be made: ERROR: No matching distribution found")
    assert why.endswith("install torch==2.13.0 numpy==2.4.6`")
    for name, why in found["absent"].items():
        assert f"Not measured: {name}: {why}.\n" in done.stdout
    assert done.stderr.startswith("dtk bench: torch: makes an environment in ")
    assert done.stderr.count("\n") == 1
    expected = ["collective allreduce"]
    if importlib.util.find_spec("horovod"):
        expected.append("horovod-loop allreduce")
    (turns,) = found["turns"].values()
    assert list(turns) == expected
    for (turn,) in turns.values():
        assert all(0 < 2 * reading["seconds"] < reading["fit"] for reading in turn)
    assert [reading["sent"] for reading in turns["collective allreduce"][0]] == [4000.0] * 2
    assert done.stdout.startswith("all-reduce of 4.00 kB\n")


def test_a_worker_that_fails_ends_the_command_with_its_code(capfd, monkeypatch):
    code = "import sys; print('hello', file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr(bench_turns, "command", lambda *_: [sys.executable, "-c", code])
    run = bench_turns.BenchRun(Setting(models=("mlp",)), Places(2))
    assert run.measure(("collective",), ()) == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert "] hello\n" in err and "failed first, with exit code 3" in err
    assert [job.name for job in run.jobs] == ["limit"]


MISTAKES = {
    "exchange": (["--exchange", "17bit"], "--exchange 17bit: unknown, expected none, fp16, bf16, "),
    "block": (["--exchange", "block:1"], "--exchange block:1 has less than a row for each of 2"),
    "steps": (["--steps", "0"], "0 is not in the range x>=1; see `dtk bench"),
    "not a number": (["--rounds", "few"], "see `dtk bench --help`"),
    "one worker": (["-n", "1"], "the limit is all there is, and a ratio of 1; use -n 2 or more"),
    "too many": (["-n", "3", "--hosts", "a:1,b:1"], "-n 3: a:1,b:1 have 2 slots; use -n 2"),
    "communicator": (["--communicator", "nccl"], "expected collective, horovod, mpi or horovod-"),
    "mpirun on hosts": (["--communicator", "horovod-mpi", "--hosts", "a:1,b:1"], "horovod"),
    "variable": (["--tuned", "fast"], "--tuned fast: expected NAME=VALUE, for example TF_"),
    "baseline": (["--peer", "jax"], "--peer jax: unknown, expected horovod-loop, "),
    "size": (["--allreduce", "big"], "--allreduce big: expected a size, such as 4kB or 100MB"),
    "plot": (["--plot", "a.pdf"], "--plot a.pdf: expected a name in .svg or .png"),
    "remote shell": (["--remote-shell", ""], "--remote-shell is empty"),
    "no file": (["--compare", "nope.json"], "cannot read nope.json: No such file or directory"),
    "another file": (["--compare", __file__], "is not a saved benchmark; expected what `dtk bench"),
    "no directory": (["--json", "nope/a.json"], "--json nope/a.json: there is no directory nope"),
    "directory": (["--markdown", "/"], "--markdown / is a directory; name a file"),
    "no name": (["--markdown", ""], "--markdown is empty; name a file"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("dtk bench: ")
    assert done.stderr.count("\n") == 1
