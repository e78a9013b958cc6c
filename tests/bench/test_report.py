"""Tables say what the samples say."""

import re

import pytest

from dtk.bench import page, report
from dtk.bench.results import BenchResults, Reading

SETTING = {
    "models": ["mlp"],
    "exchanges": ["none", "1bit"],
    "communicators": ["collective"],
    "batch_size": 32,
    "steps": 20,
    "rounds": 3,
    "workers": 2,
    "ranks": [
        {"host": "a", "cores": [0, 1], "threads": 2},
        {"host": "a", "cores": [0, 1, 2, 3], "threads": 2},
        {"host": "b", "cores": [0, 1, 2, 3, 4, 5, 6, 7], "threads": 4},
    ],
    "versions": {"TensorFlow": "2.21.0", "dtk": "0.1.0"},
}
HEADER = ("", "steps/s", "ms per step (quartiles)", "of the limit")
COUNTS = ("sent per step", "communicating")


def turns(*seconds, sent=0.0, communicating=0.0):
    """Turns of two ranks, of which the second takes 2 ms longer."""
    more = (sent, communicating, 9.0)
    return [[Reading(one, *more), Reading(one + 0.002, *more)] for one in seconds]


def results(**variants):
    return BenchResults(SETTING, {"mlp": 10_512_394}, {"mlp": variants})


BOUND = turns(0.019, 0.029, 0.024)
RUN = results(limit=BOUND, none=turns(0.039, 0.099, 0.049, sent=42e6, communicating=0.5))
BEFORE = results(limit=turns(0.024), none=turns(0.099))
UNKNOWN = {"sent": None, "communicating": None}
BASELINES = results(
    limit=BOUND,
    **{
        "torch limit": turns(0.009, 0.009, 0.009, **UNKNOWN),
        "torch ddp": turns(0.019, 0.029, 0.024, **UNKNOWN),
    },
)
SUM = BenchResults(SETTING, {}, {"allreduce 4000": {"mpi4py": turns(0.001, 0.002, 0.003)}})


def test_a_row_holds_medians_over_turns_of_means_over_ranks():
    header, limit, none = report.table(RUN, "mlp")
    assert header == (*HEADER, *COUNTS)
    assert limit == ("limit", "40.0", "25.0 (22.5 - 27.5)", "1.00", "0 B", "0 %")
    # 20 / 40, 30 / 100, 25 / 50: of each round, and then the median
    assert none == ("none", "20.0", "50.0 (45.0 - 75.0)", "0.50", "42.0 MB", "50 %")


def test_the_limit_in_step_takes_the_slowest_worker_of_each_step():
    # Two workers that are as fast, and slow at different moments: 20 ms each, 30 ms together.
    turn = [
        Reading(0.02, 0.0, 0.0, 9.0, steps=(0.01, 0.03)),
        Reading(0.02, 0.0, 0.0, 9.0, steps=(0.03, 0.01)),
    ]
    apart = [{"host": "a", "cores": [core], "threads": 1} for core in range(2)]
    variants = {"limit": [turn], "none": turns(0.039)}
    measured = BenchResults({**SETTING, "ranks": apart}, {"mlp": 7}, {"mlp": variants})
    rows = report.table(measured, "mlp")
    assert [row[0] for row in rows[1:]] == ["limit", "limit in step", "none"]
    assert rows[2][3:] == ("0.67", "0 B", "33 %")
    assert list(report.bars(measured, "mlp")) == ["limit", "limit in step", "none"]
    assert "Limit in step" in " ".join(report.notes(measured))
    shared = results(**variants)
    assert [row[0] for row in report.table(shared, "mlp")[1:]] == ["limit", "none"]
    assert "Limit in step" not in " ".join(report.notes(shared)), "one that waits helps the other"


def test_the_ratio_is_taken_within_rounds():
    # A machine that gets slower by the round: in each, both take the same.
    slower = turns(0.01, 0.1, 1.0)
    assert report.of_the_bound(slower, slower) == [1.0, 1.0, 1.0]
    ratios = report.of_the_bound(turns(0.049, 0.049), turns(0.099, 0.024))
    assert ratios == pytest.approx([2.0, 0.5])


def test_a_saved_run_adds_how_much_faster_this_one_is():
    rows = report.table(RUN, "mlp", BEFORE)
    assert [row[-1] for row in rows] == ["saved / this", "1.00", "2.00"]
    assert [row[:-1] for row in rows] == report.table(RUN, "mlp")
    # What was not saved is not compared.
    some = results(none=RUN.turns["mlp"]["none"])
    assert [row[-1] for row in report.table(BEFORE, "mlp", some)][1:] == ["", "0.50"]
    assert [row[-1] for row in report.table(RUN, "mlp", BenchResults(SETTING))][1:] == ["", ""]


def test_a_peer_is_compared_with_the_limit_and_with_its_own():
    header, limit, own, ddp = report.table(BASELINES, "mlp")
    assert header == (*HEADER, report.OWN, *COUNTS)
    assert limit[3:5] == ("1.00", "")
    assert own[3:] == ("2.50", "1.00", "", "")
    assert ddp[3:] == ("1.00", "0.40", "", "")


def test_an_all_reduce_has_times_and_no_ratio():
    header, row = report.table(SUM, "allreduce 4000")
    assert header == ("", "ms (quartiles)", "GB/s")
    assert row == ("mpi4py", "3.00 (2.50 - 3.50)", "0.00133")
    assert report.title(SUM, "allreduce 4000") == "all-reduce of 4.00 kB"


def test_bars_are_ratios_or_times_with_their_quartiles():
    assert report.bars(BASELINES, "mlp")["torch limit"] == pytest.approx((2.25, 2.5, 2.75))
    assert report.bars(SUM, "allreduce 4000")["mpi4py"] == pytest.approx((2.5, 3.0, 3.5))


def test_the_legend_explains_what_is_in_the_tables():
    assert report.notes(SUM)[0] == report.LEGEND
    (legend, _), (own, _) = report.notes(RUN), report.notes(BASELINES)
    assert "Of the limit: its time" in legend and "own limit" not in legend
    assert own.startswith(legend) and "of its own: that time" in own
    blocks = BenchResults({**SETTING, "exchanges": ["none", "block:512"]}, {}, RUN.turns)
    assert "a turn of it is of whole blocks" in report.notes(blocks)[0]
    assert "block" not in legend
    missing = BenchResults(SETTING, {}, {}, {"torch": "no space left"})
    assert report.notes(missing)[0] == "Not measured: torch: no space left."


def test_the_setting_names_hosts_cores_threads_and_versions():
    assert report.setting(RUN) == (
        "2 workers on a (4 cores), b (8 cores), threads per worker: 2 or 4; batch 32 per worker, 3 "
        "turns of 20 steps; TensorFlow 2.21.0, dtk 0.1.0"
    )


def test_markdown_holds_the_table_and_both_settings():
    shown = page.markdown(report.tables(RUN, BEFORE), report.notes(RUN, BEFORE))
    lines = shown.splitlines()
    assert lines[0] == "### mlp, 10.51 M parameters"
    assert lines[3:6] == [
        "|---|---|---|---|---|---|---|",
        "| limit | 40.0 | 25.0 (22.5 - 27.5) | 1.00 | 0 B | 0 % | 1.00 |",
        "| none | 20.0 | 50.0 (45.0 - 75.0) | 0.50 | 42.0 MB | 50 % | 2.00 |",
    ]
    assert sum("TensorFlow 2.21.0" in line for line in lines) == 2

def test_a_plot_has_every_bar_with_its_name_median_and_panel(tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    slow, summed = turns(0.199, 0.399), {"mpi4py Allreduce": turns(0.0115)}
    variants = {"limit": turns(0.099, 0.099), "collective none": slow}
    tasks = {"mlp": variants, "allreduce 4000": summed}
    run = BenchResults(SETTING, {"mlp": 7_000_000}, tasks)
    report.save_plot(run, str(tmp_path / "run.png"))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    report.save_plot(run, str(tmp_path / "run.svg"))
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "run.svg").read_text())
    shown = {"mlp, 7.00 M parameters", "limit", "collective none", "0.38", "all-reduce of 4.00 kB"}
    assert {text.strip() for text in texts} >= shown | {"mpi4py Allreduce", "12.5", "ms"}
