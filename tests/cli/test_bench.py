"""`dtk bench` as a user meets it: two workers really train, and tables say what they measured."""

import itertools
import json
import os
import statistics
import subprocess
import sys

import pytest
from click.testing import CliRunner

from dtk.cli import bench
from dtk.cli.main import main
from dtk.launch import plan
from dtk.tuning.bench.results import Reading, Results

SMALLEST = "transformer"
CONTENDERS = ["limit", "none", "1bit"]
STEPS, ROUNDS = 2, 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One small measurement, compared with a saved one in which every step took a second."""
    folder = tmp_path_factory.mktemp("bench")
    second = [[Reading(1.0, 0.0, 0.0, 1.0)]]
    seconds = dict.fromkeys(CONTENDERS, second)
    setting = {"workers": 7, "batch_size": 1, "steps": 1, "rounds": 1, "communicator": "horovod"}
    setting |= {"ranks": [], "tensorflow": "1", "keras": "1", "dtk": "0"}
    Results(setting, {}, {SMALLEST: seconds}).save(folder / "saved.json")
    options = ["--model", SMALLEST, "--exchange", "none", "--exchange", "1bit"]
    options += ["--batch-size", "2", "--steps", str(STEPS), "--rounds", str(ROUNDS)]
    options += ["--json", "run.json", "--markdown", "run.md", "--compare", "saved.json"]
    done = subprocess.run(
        [sys.executable, "-m", "dtk.cli.main", "bench", *options],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr
    return done, json.loads((folder / "run.json").read_text()), (folder / "run.md").read_text()


def samples(found, contender, what):
    """Of every turn, the mean over ranks."""
    turns = found["turns"][SMALLEST][contender]
    return [statistics.mean(reading[what] for reading in turn) for turn in turns]


def test_every_turn_of_every_rank_is_saved(run):
    _, found, _ = run
    assert list(found["turns"][SMALLEST]) == CONTENDERS
    for turns in found["turns"][SMALLEST].values():
        assert [len(turn) for turn in turns] == [2] * ROUNDS
        for reading in itertools.chain(*turns):
            assert 0 < STEPS * reading["seconds"] < reading["fit"]


def test_the_tables_say_what_the_samples_say(run):
    done, found, page = run
    limit = samples(found, "limit", "seconds")
    for contender in CONTENDERS:
        seconds = samples(found, contender, "seconds")
        middle = statistics.median(seconds)
        share = statistics.median(samples(found, contender, "communicating"))
        of_the_limit = statistics.median(a / b for a, b in zip(limit, seconds, strict=True))
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{contender} ")]
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {contender} |")]
        for text in (line, row):
            assert f" {1000 * middle:.1f} (" in text
            assert f" {of_the_limit:.2f} " in text
            assert f" {100 * share:.0f} %" in text
            assert f" {1 / middle:.2f}" in text


def test_the_command_says_nothing_else(run):
    done, found, _ = run
    assert done.stderr == ""
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[0] == f"{SMALLEST}, {found['parameters'][SMALLEST] / 1e6:.2f} M parameters"
    assert [line.split()[0] for line in lines[2:5]] == CONTENDERS
    assert lines[5] == ""
    assert lines[6].startswith("Medians over turns") and len(lines) == 9


def test_bytes_are_counted_and_1bit_sends_less_than_a_tenth(run):
    _, found, _ = run
    # the same in every turn
    (whole,), (coded,) = (set(samples(found, name, "sent")) for name in ("none", "1bit"))
    assert 1.0 <= whole / (4 * found["parameters"][SMALLEST]) < 1.01
    assert 0 < coded < whole / 10
    assert set(samples(found, "limit", "sent") + samples(found, "limit", "communicating")) == {0.0}
    assert all(0 < part < 1 for part in samples(found, "none", "communicating"))


def test_allreduces_are_saved_as_measured(run):
    _, found, _ = run
    few, many = found["allreduces"].values()
    assert len(few) == len(many) > 1
    assert 0 < statistics.median(few) < statistics.median(many)


def test_the_setting_is_that_of_both_runs(run):
    done, found, _ = run
    setting = found["setting"]
    assert (setting["workers"], setting["batch_size"]) == (2, 2)
    assert (setting["steps"], setting["rounds"]) == (STEPS, ROUNDS)
    assert setting["communicator"] == "collective"
    ours, saved = done.stdout.splitlines()[-2:]
    cores = len(os.sched_getaffinity(0))
    assert f"({cores} cores), threads per worker: {setting['ranks'][0]['threads']}; batch 2" in ours
    assert "Saved: 7 workers" in saved


def test_a_worker_that_fails_ends_the_command_with_its_code_and_no_table(capfd):
    code = "import sys; print('hello'); sys.exit(3)"
    with pytest.raises(SystemExit) as ended:
        bench._measure(plan([sys.executable, "-c", code], 2), "ssh")
    out, err = capfd.readouterr()
    assert ended.value.code == 3
    assert out == ""
    assert "] hello\n" in err and "failed first, with exit code 3" in err


MISTAKES = {
    "model": (
        ["--model", "vgg"],
        "--model vgg: unknown, expected resnet20, mlp, embedding or transformer",
    ),
    "exchange": (["--exchange", "3bit"], "--exchange 3bit: unknown, expected none, fp16, bf16, "),
    "steps": (["--steps", "0"], "--steps 0: expected 1 or more"),
    "not a number": (["--rounds", "few"], "see `dtk bench --help`"),
    "one worker": (["-n", "1"], "the limit is all there is, and a ratio of 1; use -n 2 or more"),
    "one slot": (["--hosts", "localhost:1"], "the limit is all there is"),
    "no worker": (["-n", "0"], "-n 0: expected 2 or more, e.g. `dtk bench -n 2`"),
    "too many": (["-n", "3", "--hosts", "a:1,b:1"], "-n 3: a:1,b:1 have 2 slots; use -n 2"),
    "communicator": (
        ["--communicator", "nccl"],
        "--communicator nccl: unknown, expected collective or horovod",
    ),
    "remote shell": (["--remote-shell", ""], "--remote-shell is empty"),
    "no file": (["--compare", "nope.json"], "cannot read nope.json: No such file or directory"),
    "another file": (
        ["--compare", __file__],
        "is not a saved benchmark; expected what `dtk bench --json FILE` writes",
    ),
    "no directory": (["--json", "nope/a.json"], "--json nope/a.json: there is no directory nope"),
    "directory": (["--markdown", "/"], "--markdown / is a directory; name a file"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("dtk bench: ")
    assert done.stderr.count("\n") == 1
