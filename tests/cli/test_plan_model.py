"""`dtk plan --model` as a user meets it: plans, reasons, a file, and one line for a mistake."""

import re
import textwrap

import keras
import pytest
from click.testing import CliRunner

from dtk.cli.main import main
from dtk.planning import load_plan
from dtk.planning.model import layer_times
from dtk.planning.model.layer_costs import Rates


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs it where `nets.py` is, on a machine of known rates."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layer_times, "rates_here", lambda optimizer: Rates(1e9, 1e9, update=1e-9))
    (tmp_path / "nets.py").write_text(
        textwrap.dedent("""
            import keras

            def wide():
                return keras.Sequential([
                    keras.Input((512,)),
                    keras.layers.Dense(4096, "relu", name="wide"),
                    keras.layers.Dropout(0.5, name="drop"),
                    keras.layers.Dense(10, name="head"),
                ])

            def narrow():
                return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="only")])

            def images():
                return keras.Sequential([
                    keras.Input((64, 64, 3)),
                    keras.layers.Conv2D(32, 3, padding="same", name="conv"),
                    keras.layers.BatchNormalization(name="norm"),
                    keras.layers.ReLU(name="relu"),
                    keras.layers.GlobalAveragePooling2D(name="mean"),
                    keras.layers.Dense(10, name="head"),
                ])

            def lazy():
                return keras.Sequential([keras.layers.Dense(2)])

            def number(factor=2):
                return factor

            def needs(width):
                return wide()
            """)
    )

    def invoke(*arguments, measure=False):
        options = () if "--help" in arguments or measure else ("--no-measure",)
        return CliRunner().invoke(main, ["plan", *arguments, *options])

    return invoke


def test_wide_layers_are_divided_by_channels_where_gradients_are_large(run, tmp_path):
    done = run("--model", "nets:wide", "-n", "2", "--batch-size", "8", "--json", "plan.json")
    assert done.exit_code == 0, done.stderr
    assert re.search(r"^Best: 1 x 2, layers: 1 output: .* ms per step", done.stdout, re.M)
    assert re.search(
        r"^  wide: output on 2 ranks, computes .* ms in place of .*, sends .* MB in .* ms; whole, "
        r"the step would take \+",
        done.stdout,
        re.M,
    )
    assert re.search(r"^2 x 1 +rows of the batch", done.stdout, re.M)
    assert re.search(r"^1 x 1 +one worker +\S+ +1.00 ", done.stdout, re.M)
    plan = load_plan("plan.json")
    assert (plan.data, plan.model_parallel, plan.batch_size) == (1, 2, 8)
    assert plan.layers == {"wide": "output"}
    assert 'plan = dtk.planning.load_plan("plan.json")' in done.stdout
    assert "model = dtk.layers.parallelize(build(), plan.layers)" in done.stdout
    assert "# dtk run -n 2 train.py" in done.stdout


def test_layers_are_measured_unless_told_otherwise(run):
    done = run("--model", "nets:narrow", "-n", "2", "--batch-size", "4", measure=True)
    assert done.exit_code == 0, done.stderr
    assert "dtk plan: measuring only whole / 1, 4 rows\n" in done.stderr
    assert re.search(r"^Computing: \d+ layers and parts of them, measured on", done.stdout, re.M)


def test_images_are_divided_by_rows_of_the_batch_and_changes_are_named(run):
    """Few weights: nothing is faster than replicas by more than predictions are off."""
    out = run("--model", "nets:images", "-n", "4", "--batch-size", "64").stdout
    assert re.search(r"^4 x 1 +rows of the batch", out, re.M)
    assert re.search(r"^\d x \d +\d stages, \d+ microbatch(es)?, \S+, inexact", out, re.M)
    assert "Best: 4 x 1" in out or "Warning: the best plan is predicted" in out
    assert "workers on a host: 4" in out and "operations at 1 GFlop/s" in out


def test_a_saved_model_on_hosts_is_planned_with_their_links(run):
    keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)]).save("model.keras")
    options = ("--model", "model.keras", "--hosts", "a:2,b:2")
    assert "say what joins hosts" in run(*options).stderr
    done = run(*options, "--bandwidth", "100Mbit/s", "--latency", "1ms")
    assert done.exit_code == 0, done.stderr
    assert "model.keras on 4 workers, 32 rows" in done.stdout
    assert "workers on a host: 2;" in done.stdout
    assert "between hosts 1e+03 us and 100 Mbit/s" in done.stdout
    assert "Warning: one worker is predicted to be as fast as all of them." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--model", "gone.keras", "-n", "2"), "--model gone.keras: no such file; write it with"),
        (("--model", "gone:f", "-n", "2"), "--model gone:f: cannot import gone"),
        (("--model", "nets:gone", "-n", "2"), "nets has no function gone"),
        (("--model", "nets:number", "-n", "2"), "number() returned a int; expected a keras.Model"),
        (("--model", "nets:needs", "-n", "2"), "calling needs() failed"),
        (("--model", "nets:lazy", "-n", "2"), "does not know its input; begin it with keras.Input"),
        (("--model", "nets:wide"), "among how many workers? Add -n"),
        (("--model", "nets:wide", "-n", "2", "--memory", "1MB"), "needs least takes"),
        (("--model", "nets:wide", "-n", "2", "--workers", "1,2"), "--workers does not go with"),
        (("--model", "nets:wide", "-n", "9", "--hosts", "a:2"), "use -n 2 or give"),
        (("--model", "nets:wide", "--hosts", "a:2,b:1"), "hosts have [1, 2] slots"),
        (("--model", "nets:wide", "-n", "2", "--json", "no/p.json"), "there is no directory no"),
        (("--model", "nets:wide", "-n", "2", "--communicator", "horovod"), "--bench"),
        (("--step-time", "1ms", "--parameters", "1k", "-n", "2"), "-n divides a model among"),
    ],
)
def test_a_mistake_is_one_line(run, arguments, told):
    done = run(*arguments)
    assert done.exit_code == 2 and told in done.stderr
    assert done.stderr.startswith("dtk plan: ") and done.stderr.count("\n") == 1
