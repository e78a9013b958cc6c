"""A hostfile that is read wrongly starts ranks on the wrong hosts, or too many of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.cluster import Host, parse_hostfile, parse_hosts, read_hostfile
from dtk.errors import ClusterError

names = st.sampled_from(["a", "node-1", "node-2", "x1.example.org", "10.0.0.1"])
hosts = st.lists(st.builds(Host, names, st.integers(1, 99)), min_size=1, max_size=6)
styles = st.sampled_from(
    ["{} slots={}", "{}:{}", "  {}   slots={}  # fast", "{}\tslots={} max_slots=99"]
)


@given(hosts, st.data())
def test_every_way_of_writing_gives_the_same_hosts_with_duplicates_summed(given_hosts, data):
    lines = ["# my hosts", ""]
    for host in given_hosts:
        lines += [data.draw(styles).format(host.name, host.slots), ""]
    expected: dict[str, int] = {}
    for host in given_hosts:
        expected[host.name] = expected.get(host.name, 0) + host.slots
    assert [(h.name, h.slots) for h in parse_hostfile("\n".join(lines))] == list(expected.items())


@given(hosts)
def test_the_command_line_form_says_the_same_as_the_file(given_hosts):
    text = ",".join(f"{host.name}:{host.slots}" for host in given_hosts)
    assert parse_hosts(text) == parse_hostfile(text.replace(",", "\n"))


def test_addresses_and_bare_names_are_hosts():
    assert parse_hostfile("10.0.0.1:2\n[fe80::1] slots=2\nnode_1.example.org\n") == (
        Host("10.0.0.1", 2),
        Host("[fe80::1]", 2),
        Host("node_1.example.org", 1),
    )


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a slots=2\nb slots=x", "f:2: 'b slots=x' has 'x' slots"),
        ("a slots=0", "f:1: 'a slots=0' has '0' slots"),
        ("a:0", "f:1: 'a:0' has '0' slots"),
        ("a:1:2", "f:1: 'a:1:2' is not a host"),
        ("a:2 slots=3", "f:1: 'a:2 slots=3' gives the slots twice"),
        ("a\n\nb c", "f:3: 'c' is not understood"),
        ("a slots = 2", "f:1: 'slots' is not understood"),
        ("# nothing\n", "f names no host"),
    ],
)
def test_errors_name_file_and_line_and_the_expected_form(text, where):
    with pytest.raises(ClusterError) as error:
        parse_hostfile(text, "f")
    assert str(error.value).startswith(where)
    assert "expected" in str(error.value) or "write one" in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ClusterError, match="cannot read hostfile .*nope: No such file"):
        read_hostfile(tmp_path / "nope")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="not a text file"):
        read_hostfile(tmp_path / "binary")


@pytest.mark.parametrize("text", ["", "a,,b", "a:", "a b"])
def test_hosts_option_refuses(text):
    with pytest.raises(ClusterError, match="hosts"):
        parse_hosts(text)
