"""Parts of the monitor alone: the rule that names the rank behind, and the messages between ranks."""

from __future__ import annotations

import json
import socket

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helix.comm.heartbeat import Link, decode, encode, listen
from helix.comm.progress import Progress, Pulse, find_stalled
from helix.comm.world import interface_towards


def ranks_at(*pulses: tuple[int, bool]) -> list[Progress]:
    """Ranks with these counts of collectives, idle or not."""
    return [Progress(rank=rank, pulse=Pulse(n, 0, "x", idle, 0.0)) for rank, (n, idle) in enumerate(pulses)]


def first_stalled(ranks: list[Progress], ticks: int = 5) -> int | None:
    """Who is named within `ticks` seconds, with a timeout of three."""
    for _ in range(ticks):
        found = find_stalled(ranks, 3.0, 1.0)
        if found is not None:
            return found[0]
    return None


@pytest.mark.parametrize(
    ("pulses", "named"),
    [
        (((5, False), (4, False), (5, False)), 1),  # one is behind
        (((5, False), (5, False), (4, True)), 2),  # it has not woken up
        (((4, False), (4, True), (4, True)), 0),  # rank 0 does not send the step that the others wait for
        (((4, False), (5, True), (5, True)), 0),  # the same where the wait is counted
        (((5, True), (4, False), (5, False)), None),  # no step is under way
        (((5, True), (5, True), (5, True)), None),
        (((5, False), (5, False), (5, False)), 0),  # all in one place: the first is named, and the reason says so
    ],
)
def test_the_rank_behind_is_named(pulses: tuple[tuple[int, bool], ...], named: int | None) -> None:
    assert first_stalled(ranks_at(*pulses)) == named


def test_all_in_one_place_is_told_apart() -> None:
    ranks = ranks_at((5, False), (5, False))
    reasons = [find_stalled(ranks, 3.0, 1.0) for _ in range(3)]
    assert reasons[:2] == [None, None]
    assert reasons[2] is not None
    assert "nor did any other rank" in reasons[2][1]


def test_waiting_for_another_does_not_count() -> None:
    """Rank 0 waits two ticks for rank 1; when that has caught up, both have the whole timeout."""
    ranks = ranks_at((5, False), (4, False))
    assert first_stalled(ranks, ticks=2) is None
    ranks[1].update(Pulse(5, 0, "x", False, 0.0))
    assert first_stalled(ranks, ticks=2) is None
    assert first_stalled(ranks, ticks=1) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6))
def test_named_rank_is_never_ahead(pulses: list[tuple[int, bool]]) -> None:
    named = first_stalled(ranks_at(*pulses))
    assert (named is None) == pulses[0][1]
    if named is not None:
        assert pulses[named][0] == min(count for count, _ in pulses)


@given(st.binary(max_size=400), st.integers(1, 50))
def test_any_bytes_are_survived(data: bytes, piece: int) -> None:
    """A good message behind any bytes is either read or the link is given up; nothing raises."""
    near, far = socket.socketpair()
    with near, far:
        link = Link(near)
        for start in range(0, len(data), piece):
            far.sendall(data[start : start + piece])
            if link.alive:
                link.receive()
        far.close()
        for _ in range(100):
            if not link.alive:
                break
            link.receive()
        assert not link.alive


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=8))
def test_messages_are_whole_or_refused(value: object) -> None:
    line = json.dumps({"kind": "report", "cause": "raised", "reason": value}).encode()
    assert (decode(line) is not None) == isinstance(value, str)
    assert decode(json.dumps(value).encode()) is None
    assert decode(json.dumps({"kind": value}).encode()) is None


def test_messages_come_whole_in_pieces() -> None:
    near, far = socket.socketpair()
    with near, far:
        link = Link(near)
        for byte in encode("report", cause="raised", reason="a\nb"):
            assert link.receive() == []
            far.sendall(bytes([byte]))
        assert link.receive() == [{"kind": "report", "cause": "raised", "reason": "a\nb"}]
        assert link.alive


@pytest.mark.parametrize(
    ("master_addr", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("192.0.2.1", "0.0.0.0"), ("no.such.invalid", "0.0.0.0")],
)
def test_listens_where_the_others_look(master_addr: str, bound: str) -> None:
    with listen(master_addr) as listener:
        assert listener.getsockname()[0] in (bound, "::1" if master_addr == "localhost" else bound)


def test_the_interface_that_other_machines_reach() -> None:
    """Loopback is right for ranks of one machine only."""
    loopback = next(
        name for name, found in psutil.net_if_addrs().items() if any(one.address == "127.0.0.1" for one in found)
    )
    for address in ("127.0.0.1", "localhost"):
        assert interface_towards(address, is_local=True) == loopback
        assert interface_towards(address, is_local=False) is None
