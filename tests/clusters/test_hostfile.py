"""Hosts of a job, from a file or from -H."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.launcher.engines.hostfile import HostEntry, loads_of_workers, parse_hosts, read_hostfile


def test_a_hostfile_gives_slots_gpus_and_loads(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\nnode1 slots=4 gpus=0,2 load=3\n\nuser@node2  # one worker\nnode3 gpus=0,1,1\n")
    found = read_hostfile(file)
    assert found == [HostEntry("node1", 4, (0, 2), 3.0), HostEntry("user@node2"), HostEntry("node3", 3, (0, 1, 1))]
    assert loads_of_workers(found, 6) == (3, 3, 3, 3, 1, 1)
    assert loads_of_workers(found[1:], 4) == ()


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("a\nb slots=0", "line 2: 'slots=0' is not a setting"),
        ("a\n\n# c\nb gpus=x", "line 4: 'gpus=x' is not a setting"),
        ("a load=-1", "line 1: 'load=-1' is not a setting"),
        ("a load=nan", "line 1: 'load=nan' is not a setting"),
        ("a cores=3", "line 1: 'cores=3' is not a setting of a host; expected slots=4, gpus=0,2 or load=3"),
        ("a\na slots=2", "line 2: host 'a' occurs twice"),
        ("-oProxyCommand=x", "line 1: '-oProxyCommand=x' is not the name of a host"),
        ("# none", "names no host"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, lines: str, error: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(lines)
    with pytest.raises(ValueError, match=error):
        read_hostfile(file)


def test_hosts_on_the_command_line() -> None:
    assert parse_hosts("node1,node2:4") == [HostEntry("node1"), HostEntry("node2", 4)]
    for words, error in (("a:x", "slots=x"), ("a,a", "occurs twice"), ("", "not the name"), (":2", "not the name")):
        with pytest.raises(ValueError, match=error):
            parse_hosts(words)
