"""Lines that several processes write equally are shown once."""

from dtk.launch.output import EqualLines


def test_equal_lines_of_several_ranks_are_one():
    equal = EqualLines()
    for line in ("warning", "  code", "warning"):
        equal.add(0, line, 0.0)
    assert equal.due(0.1) == []
    for line in ("  code", "warning", "own", "warning"):
        equal.add(1, line, 0.2)
    assert equal.due(0.6) == [("warning", [0, 1]), ("  code", [0, 1]), ("warning", [0, 1])]
    equal.add(1, "warning", 0.6)
    assert equal.due() == [("own", [1]), ("warning", [1])]
    equal.add(0, "own", 5.0)
    assert (equal.due(8.0), equal.late) == ([], 1)
    assert equal.due(11.0) == []
    equal.add(2, "own", 12.0)
    assert equal.due() == [("own", [2])]


def test_of_a_flood_few_lines_are_held():
    """All that a slow reader had not yet taken was in the launcher's memory."""
    equal = EqualLines()
    for number in range(10_000):
        equal.add(0, str(number), 0.0)
    assert not equal.is_full and equal.due(0.1) == []
    equal.add(0, "10000", 0.1)
    assert equal.is_full
    assert equal.due(0.1) == [("0", [0])]
    equal.add(1, "10000", 0.2)
    assert equal.due()[-1] == ("10000", [0, 1])
