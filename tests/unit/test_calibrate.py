"""`helix calibrate`: real measurements on CPU ranks make a card that the planner reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from helix.bench.launches import Sample, fit_line
from helix.calibrate import calibrate, report_rows, write_card
from helix.cost.hardware import OPS, load_hardware
from helix.errors import ConfigError
from tests.ranks import RankPool
from tests.unit.cost_jobs import calibrate_card


def test_one_rank_writes_a_card(tmp_path: Path) -> None:
    found = calibrate(1, "cpu")
    assert found is not None
    path = tmp_path / "mine.yaml"
    write_card(found, path)
    card = load_hardware(str(path))
    assert card.memory.value == pytest.approx(found.best_read_rate, rel=0.01)
    assert set(card.collectives) == set(OPS)
    assert "not measured" in card.collectives["all_reduce"].source
    assert "measured on cpu" in card.kernels["linear"].source
    # Round trip: what was not measured is that of the base card.
    base = load_hardware("cpu")
    assert card.collectives["all_to_all"].us == base.collectives["all_to_all"].us
    assert card.collectives["all_to_all"].sent_bytes == pytest.approx(base.collectives["all_to_all"].sent_bytes)
    assert len(report_rows(found)) >= 8


def test_ranks_measure_their_collectives(ranks: RankPool, tmp_path: Path) -> None:
    cards = ranks.run(2, calibrate_card)
    path = tmp_path / "two.yaml"
    path.write_text(cards[0])
    card = load_hardware(str(path))
    for op in OPS:
        curve = card.collectives[op]
        assert curve.ranks == 2
        assert "measured on cpu, 2 ranks" in curve.source
        assert curve.us[0] > 0


@pytest.mark.slow
def test_a_plain_process_starts_the_other_ranks() -> None:
    found = calibrate(2, "cpu")
    assert found is not None
    assert found.num_ranks == 2
    assert set(found.collectives) == set(OPS)


def test_line() -> None:
    def samples(*points: tuple[float, float]) -> list[Sample]:
        return [Sample("x", size, 0.0, us) for size, us in points]

    line = fit_line(samples((100.0, 7.0), (1100.0, 12.0), (2100.0, 17.0)))
    assert line.fixed_us == pytest.approx(6.5)
    assert line.rate == pytest.approx(200.0)
    assert line.error < 1e-9
    # A larger size that took no longer is noise, not a negative time.
    noisy = fit_line(samples((100.0, 7.0), (1100.0, 6.0)))
    assert noisy.fixed_us >= 0
    assert noisy.rate > 0
    # Relative errors count: a long launch does not drown the short ones.
    uneven = fit_line(samples((0.0, 10.0), (0.0, 10.0), (1e6, 1010.0), (1e6, 1100.0)))
    assert uneven.fixed_us == pytest.approx(10.0, rel=0.01)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="--ranks 0"):
        calibrate(0, "cpu")
    with pytest.raises(ConfigError, match="not a hardware card"):
        calibrate(1, "cpu", "abacus")
