"""The plot shows what the tables say."""

import re

import pytest

from dtk.bench import report
from dtk.bench.results import BenchResults, Reading
from dtk.bench.setting import BenchError


def turns(*seconds):
    return [[Reading(one, None, None, 1.0)] for one in seconds]


RUN = BenchResults(
    {"communicators": ["collective"]},
    {"mlp": 7_000_000},
    {
        "mlp": {"limit": turns(0.1, 0.1), "collective none": turns(0.2, 0.4)},
        "allreduce 4000": {"mpi4py Allreduce": turns(0.0125)},
    },
)


@pytest.mark.parametrize(("suffix", "head"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_a_file_of_either_kind_is_drawn(tmp_path, suffix, head):
    file = tmp_path / f"run{suffix}"
    report.save_plot(RUN, str(file))
    assert file.read_bytes().startswith(head)


def test_every_bar_stands_with_its_name_median_and_panel(tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    file = tmp_path / "run.svg"
    report.save_plot(RUN, str(file))
    texts = [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text())]
    for expected in (
        "mlp, 7.00 M parameters",
        "limit",
        "collective none",
        "0.38",
        "all-reduce of 4.00 kB",
        "mpi4py Allreduce",
        "12.5",
        "ms",
    ):
        assert expected in texts


def test_another_kind_of_file_is_refused():
    with pytest.raises(BenchError, match=r"--plot run.pdf: expected a name in .svg or .png"):
        report.check_plot("run.pdf")
