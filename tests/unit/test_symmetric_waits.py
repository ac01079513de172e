"""Waits of kernels for peers, as the host sees them: which rank is named, and where."""

from __future__ import annotations

import pytest

from helix.comm.symmetric import Waits
from helix.errors import RankFailure


def test_the_rank_and_the_place_are_named() -> None:
    waits = Waits(limit_s=2.0)
    assert waits.number((0, 1), "an all-reduce or all-gather over world") == 0
    assert waits.number((1, 3), "exchange 0 over kvp") == 2
    waits.check()
    waits.late.fill_(1 + 2 + 1)
    with pytest.raises(RankFailure, match="rank 3 sent nothing to exchange 0 over kvp within 2 s"):
        waits.check()


def test_waits_that_the_host_gave_up_are_nobodys_failure() -> None:
    waits = Waits()
    waits.give_up()
    assert int(waits.late) != 0
    waits.check()
