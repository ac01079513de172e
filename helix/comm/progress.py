"""How far each rank is, and the rule that says which one holds the others up. No sockets, no threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pulse:
    """What one rank's main thread is doing.

    `num_collectives` is comparable across ranks, `num_moves` (everything else it got done) is not. `limit_s` is not 0
    inside an announced long operation.
    """

    num_collectives: int
    num_moves: int
    label: str
    idle: bool
    limit_s: float

    @property
    def place(self) -> str:
        return f"{self.label!r} (collective {self.num_collectives})"


@dataclass(slots=True, kw_only=True)
class Progress:
    """The last pulse of `rank`, and for how many ticks it has held up the others."""

    rank: int
    pulse: Pulse = Pulse(0, 0, "starting", False, 0.0)
    ticks_late: int = 0

    def update(self, pulse: Pulse) -> None:
        before = self.pulse
        if (pulse.num_collectives, pulse.num_moves) != (before.num_collectives, before.num_moves):
            self.ticks_late = 0
        self.pulse = pulse


def find_stalled(ranks: Sequence[Progress], stall_timeout_s: float, heartbeat_s: float) -> tuple[int, str] | None:
    """One tick of `heartbeat_s` passes: the rank that has held the others up for too long, and how, or None.

    ``ranks[0]`` is rank 0. The clock of a rank runs while it is one of `latest` and does not move, so a rank that
    waited for another, however long, starts afresh when that other has caught up. A rank that still moves (it loads a
    larger share, say) is waited for rightly.
    """
    late = {one.rank for one in latest(ranks)}
    for one in ranks:
        one.ticks_late = one.ticks_late + 1 if one.rank in late else 0
    stalled = [one for one in ranks if one.ticks_late * heartbeat_s >= max(stall_timeout_s, one.pulse.limit_s)]
    if not stalled:
        return None
    worst = max(stalled, key=lambda one: (one.ticks_late, -one.rank))
    ahead = sorted(one.rank for one in ranks if one.pulse.num_collectives > worst.pulse.num_collectives)
    reason = f"made no progress for {max(stall_timeout_s, worst.pulse.limit_s):g} s, last seen at {worst.pulse.place}"
    if ahead:
        reason += f", while {rank_list(ahead)} waited further on"
    elif len(stalled) == len(ranks):
        reason += ", and nor did any other rank: a device or the network between them no longer answers"
    return worst.rank, reason


def latest(ranks: Sequence[Progress]) -> list[Progress]:
    """The ranks that wait for no other one. ``ranks[0]`` is rank 0.

    All ranks enter the same collectives in the same order, so nobody waits for a rank that is ahead: only those with
    the fewest collectives can be at fault. Of these, one that idles waits for rank 0's next message, which a rank that
    does not idle has to send first. Between steps, when rank 0 idles, nobody is late.
    """
    if ranks[0].pulse.idle:
        return []
    fewest = min(one.pulse.num_collectives for one in ranks)
    behind = [one for one in ranks if one.pulse.num_collectives == fewest]
    return [one for one in behind if not one.pulse.idle] or behind


def rank_list(ranks: Sequence[int]) -> str:
    """Words such as "rank 3" or "ranks 3, 5"; long lists are cut."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
