"""`dtk plan` as a user meets it: a table, a sentence, files, and one line for a mistake."""

import importlib.util
import json
import re
import sys

import pytest
from click.testing import CliRunner

from dtk.bench.results import BenchResults, Reading
from dtk.cli.main import main
from dtk.planning.inputs import Cluster, Link, Software, Training
from dtk.planning.plan_methods import METHODS, predict
from dtk.version import pip_install

GIVEN = ["--step-time", "85ms", "--parameters", "270k"]
NETWORK = ["--bandwidth", "1Gbit/s", "--latency", "50us"]


def run(*arguments):
    return CliRunner().invoke(main, ["plan", *arguments])


@pytest.fixture
def bench(tmp_path):
    """A saved benchmark of two workers, on so many hosts."""

    def save(hosts=1):
        turns = {
            "limit": [[Reading(0.1, 0.0, 0.0, 1.0, (0.1,))] * 2],
            "collective none": [[Reading(0.15, 4e6, 0.5, 1.0)] * 2],
        }
        sums = {
            "allreduce 131072": {
                "collective allreduce": [[Reading(0.002, 1 << 17, None, 1.0)] * 2]
            },
            "allreduce 4194304": {"collective allreduce": [[Reading(0.012, 4 << 20, None, 1.0)]]},
        }
        ranks = [{"host": f"host{rank % hosts}", "cores": [rank]} for rank in range(2)]
        setting = {"workers": 2, "batch_size": 16, "ranks": ranks}
        setting["communicators"] = ["collective"]
        file = tmp_path / "bench.json"
        BenchResults(setting, {"mlp": 1_000_000}, {"mlp": turns, **sums}).save(file)
        return ["--bench", str(file)]

    return save


def test_tables_hold_what_the_model_says():
    done = run(*GIVEN, *NETWORK, "--workers", "1,...,4,64", "--price-per-hour", "2.5")
    assert done.exit_code == 0, done.stderr
    cluster = Cluster(Link(50e-6, 125e6), price=2.5, software=Software())
    told = [predict(METHODS[0], Training(0.085, 270_000), cluster, n) for n in (1, 2, 4, 64)]
    milliseconds, efficiency, price = re.findall(r"^dense +(.*)$", done.stdout, re.MULTILINE)
    assert [float(cell) for cell in milliseconds.split()] == pytest.approx(
        [1000 * one.seconds for one in told], rel=0.005
    )
    assert efficiency.split() == [f"{one.efficiency:.2f}" for one in told]
    assert [float(cell) for cell in price.split()] == pytest.approx(
        [one.price for one in told], rel=0.005
    )
    header = next(line for line in done.stdout.splitlines() if line.startswith("workers"))
    assert header.split() == ["workers", "1", "2", "4", "64"]


def test_it_recommends_says_what_it_assumes_and_warns_of_change():
    out = run(*GIVEN, *NETWORK, "--workers-per-host", "4").stdout
    assert re.search(r"^Use \d+ workers and AllReduceStrategy\(.*\): .* rows per second", out, re.M)
    assert "Assumed: a step of 85 ms for 32 rows" in out and "1 Gbit/s" in out
    assert "Faster, but training changes; " in out and "docs/exchanges.md" in out
    assert "price" not in out


def test_a_benchmark_calibrates_and_the_network_is_given_unless_it_was_between_hosts(bench):
    done = run(*bench(), "--bandwidth", "100Mbit/s", "--workers", "1,2,4")
    assert done.exit_code == 0, done.stderr
    assert "a step of 100 ms for 16 rows" in done.stdout
    assert "4.00 MB of gradients" in done.stdout
    assert "workers on a host: 2; between hosts 0 us and 100 Mbit/s" in done.stdout
    row = re.search(r"^dense +(.*)$", done.stdout, re.MULTILINE)[1].split()
    # on one host: as measured, since the rest of the step is what a strategy adds
    assert row[:2] == ["100", "150"] and float(row[2]) > 500
    done = run(*bench(hosts=2), "--workers", "1,2,4")
    assert done.exit_code == 0, done.stderr
    assert re.search(r"^dense +100 +150 ", done.stdout, re.MULTILINE)
    refused = run(*bench(hosts=2), "--bandwidth", "1Gbit/s")
    assert "was run between 2 hosts and holds their network; leave it out" in refused.stderr


def test_another_model_is_planned_with_what_a_benchmark_found_of_sending(bench):
    given = ["--step-time", "400ms", "--parameters", "44M", "--batch-size", "64"]
    done = run(*bench(), *given, "--bandwidth", "25Gbit/s", "--workers", "1,2,4")
    assert done.exit_code == 0, done.stderr
    assert "a step of 400 ms for 64 rows on a worker, 176.0 MB of gradients" in done.stdout
    # 12 - 2 ms for 4 MiB - 128 KiB, and two messages
    assert "software adds 839 us to a message and 2.5 ns to a byte" in done.stdout
    slower = run(*given, "--bandwidth", "25Gbit/s", "--latency", "0us", "--workers", "1,2,4")
    assert "software adds 770 us to a message and 3 ns to a byte" in slower.stdout


def test_a_fixed_global_batch_scales_strongly():
    out = run(*GIVEN, *NETWORK, "--global-batch", "64", "--workers", "1,2").stdout
    alone, two = re.search(r"^dense +(.*)$", out, re.MULTILINE)[1].split()
    assert alone == "170" and 85 < float(two) < 100


def test_files_hold_the_same_and_a_curve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = ["--json", "plan.json", "--markdown", "plan.md"]
    done = run(*GIVEN, *NETWORK, "--workers", "1,2", *files)
    assert done.exit_code == 0, done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert len(found["predictions"]) == 2 * len(METHODS)
    cluster = Cluster(Link(50e-6, 125e6))
    for one, method in zip(found["predictions"][::2], METHODS, strict=True):
        assert one["seconds"] == predict(method, Training(0.085, 270_000), cluster, 1).seconds
    assert found["cluster"]["host"]["bandwidth"] is None
    assert found["recommended"]["method"] in [method.name for method in METHODS]
    page = (tmp_path / "plan.md").read_text()
    assert "### ms per step" in page and "| dense | 85.0 | " in page
    if importlib.util.find_spec("matplotlib"):
        assert run(*GIVEN, *NETWORK, "--plot", "curve.svg").exit_code == 0
        drawn = (tmp_path / "curve.svg").read_text()
        assert all(f"<!-- {method.name} -->" in drawn for method in METHODS)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run(*GIVEN, *NETWORK, "--plot", "curve.svg")
    assert f"--plot needs matplotlib; run `{pip_install('bench')}`" in done.stderr


MISTAKES = {
    "zero": (["--step-time", "0s", "--parameters", "1"], "--step-time 0s: a step takes time"),
    "no link": (GIVEN, "4096 workers are more than a host's 1: say what joins hosts"),
    "no workers": ([*GIVEN, *NETWORK, "--workers", "0,1"], "--workers 0: expected a whole number"),
    "no hosts": ([*GIVEN, *NETWORK, "--workers-per-host", "0"], "--workers-per-host 0: expected"),
    "negative": ([*GIVEN, "--price-per-hour", "-1"], "-1.0 is not in the range"),
    "target": ([*GIVEN, *NETWORK, "--efficiency", "70"], "70.0 is not in the range 0<x<=1"),
    "not a number": ([*GIVEN, "--price-per-hour", "much"], "see `dtk plan --help`"),
    # Every price was nan.
    "nan": ([*GIVEN, "--price-per-hour", "nan"], "--price-per-hour nan: expected a finite number"),
    "another file": (["--bench", __file__], "is not a saved benchmark; expected what `dtk bench"),
    "both": (["--bench", "a.json", "--step-time", "1s"], "--step-time was given, and a.json says"),
    "model": ([*GIVEN, "--model", "mlp"], "--model mlp chooses from a benchmark; give its file"),
    "communicator": ([*GIVEN, "--communicator", "horovod"], "horovod chooses from a benchmark;"),
    "no directory": ([*GIVEN, "--json", "no/a"], "--json no/a: there is no directory no; make it"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("dtk plan: ")
    assert done.stderr.count("\n") == 1
