"""A start that waits says once for whom."""

from dtk.cluster import waiting
from dtk.cluster.waiting import Wait


def test_it_says_once_and_late_for_whom_and_how_long(monkeypatch, capsys):
    wait = Wait("rank 1", 100.0)
    wait.say("rank 0 (node1:2222)")
    assert 9.0 < wait.quiet <= 10.0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(waiting, "AFTER", 0.0)
    assert wait.quiet == 0.0
    wait.say("rank 0 (node1:2222)")
    wait.say("rank 0 (node1:2222)")
    assert capsys.readouterr().err == (
        "dtk: rank 1: waiting for rank 0 (node1:2222), for 100 s more "
        "(DTK_START_TIMEOUT sets the limit)\n"
    )
    assert 90.0 < wait.quiet <= 100.0
    assert Wait("rank 1", 0.0).left == 0.0
