"""Where ranks go: host lists, host files, placement."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from perseus.run.hosts import Host, parse_hostfile, parse_hosts, place
from perseus.run.link import ssh_command


def test_host_list_takes_names_with_and_without_slots() -> None:
    expected = [Host("a", 2), Host("b.example.org", 1), Host("me@c", 3), Host("10.0.0.7", 4)]
    assert parse_hosts("a:2,b.example.org,me@c:3,10.0.0.7:4") == expected


def test_slots_of_a_host_named_twice_add_up() -> None:
    assert parse_hosts("a:2,b:1,a:3") == [Host("a", 5), Host("b", 1)]


@pytest.mark.parametrize(
    "text",
    ["a:", "a:x", ":2", "", "a,,b", "-oProxyCommand=x:2", "a:2:3", "a b:2",
     "[-oProxyCommand=x]", "[[-oProxyCommand=x]]:2", "me@-oProxyCommand", "[me@-oProxy=x]:2"],
)  # fmt: skip
def test_bad_host_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="Invalid host input"):
        parse_hosts(text)


def test_no_slots_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"slots=0: expected 1 or more"):
        parse_hosts("a:0")


def test_hostfile_takes_all_three_forms_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# cluster\n\na slots=2\nb:3  # the new one\n  c\nd slots = 4 max_slots=8\n")
    expected = [Host("a", 2), Host("b", 3), Host("c", 1), Host("d", 4)]
    assert parse_hostfile(str(file)) == expected


def test_slots_count_wherever_they_stand_in_a_line_of_a_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a max_slots=4 slots=2\nb port = 22 slots = 3 x=y\n")
    assert parse_hostfile(str(file)) == [Host("a", 2), Host("b", 3)]


@pytest.mark.parametrize("slots", ["two", "-3", "0", "4,", "1.5"])
def test_slots_that_are_no_number_are_named(tmp_path: Path, slots: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"a slots=1\nb max_slots=9 slots={slots}\n")
    with pytest.raises(ValueError, match=rf"hosts, line 2: slots={slots}: expected 1 or more"):
        parse_hostfile(str(file))


def test_option_of_ssh_is_no_host_in_a_hostfile_either(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a\n[-oProxyCommand=x] slots=2\n")
    with pytest.raises(ValueError, match=r"Invalid host input in .*hosts, line 2: "):
        parse_hostfile(str(file))


def test_name_of_a_host_cannot_become_an_option() -> None:
    command = ssh_command("host1", 60)
    assert command[-3:-1] == ["--", "host1"]
    assert not any("StrictHostKeyChecking" in word for word in command)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh")
def test_jobs_do_not_share_the_connections_of_each_other(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"ControlMaster auto\nControlPath {tmp_path}/%n\n")
    ssh, *options = ssh_command("host1", 60)[:-1]
    command = [ssh, "-F", str(config), "-G", *options]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "controlmaster false" in shown
    assert f"controlpath {tmp_path}/host1" in shown  # it uses one that the user shares


def test_bad_hostfile_line_is_named_with_its_number(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb slots\n")
    with pytest.raises(ValueError, match=r"hosts, line 2: 'b slots'"):
        parse_hostfile(str(file))


def test_missing_and_empty_hostfiles_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--hostfile .*nowhere: No such file"):
        parse_hostfile(str(tmp_path / "nowhere"))
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ValueError, match="names no host"):
        parse_hostfile(str(tmp_path / "empty"))


def test_hosts_are_filled_in_order_and_cross_ranks_count_owners_of_a_local_rank() -> None:
    slots = place([Host("a", 1), Host("b", 3), Host("c", 2), Host("d", 9)], 6)
    found = [
        (s.rank, s.host, s.local_rank, s.local_size, s.cross_rank, s.cross_size) for s in slots
    ]
    assert found == [
        (0, "a", 0, 1, 0, 3),
        (1, "b", 0, 3, 1, 3),
        (2, "b", 1, 3, 0, 2),
        (3, "b", 2, 3, 0, 1),
        (4, "c", 0, 2, 2, 3),
        (5, "c", 1, 2, 1, 2),
    ]


def test_fewer_ranks_than_slots_start_exactly_that_many() -> None:
    assert [slot.host for slot in place([Host("a", 2), Host("b", 2)], 3)] == ["a", "a", "b"]


def test_too_few_slots_is_an_error_with_both_numbers() -> None:
    message = r"Requested more processes \(5\) than slots available \(4\) on a:1, b:3"
    with pytest.raises(ValueError, match=message):
        place([Host("a", 1), Host("b", 3)], 5)
