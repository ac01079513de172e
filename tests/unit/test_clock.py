"""The exchange's clock: which steps it samples, and that the parts lie within the whole."""

from __future__ import annotations

import time

import pytest
import torch

from helix.comm.clock import EVERY, Clock


def test_one_step_in_so_many_is_timed() -> None:
    clock = Clock()
    for _ in range(3 * EVERY):
        with clock.step(torch.device("cpu")):
            for _ in range(2):
                with clock.exchange():
                    time.sleep(0.001)
        with clock.exchange():  # of a step that is not timed
            time.sleep(0.0001)
    assert clock.num_steps == 3
    assert 0.006 <= clock.exchange_s <= clock.step_s < 1


def test_a_step_that_fails_is_not_counted() -> None:
    clock = Clock()
    for _ in range(2 * EVERY):
        with pytest.raises(RuntimeError, match="lost"), clock.step(torch.device("cpu")), clock.exchange():
            raise RuntimeError("lost")
    assert (clock.num_steps, clock.step_s, clock.exchange_s) == (0, 0.0, 0.0)


@pytest.mark.gpu
def test_on_a_gpu_nobody_waits_for_the_events() -> None:
    device, clock = torch.device("cuda"), Clock()
    x = torch.ones(1024, 1024, device=device)
    for _ in range(2 * EVERY):
        with clock.step(device):
            x = x @ x / 1024
            with clock.exchange():
                x = x @ x / 1024
    torch.cuda.synchronize()
    with clock.step(device):
        pass
    for _ in range(EVERY):
        with clock.step(device):
            pass
    assert clock.num_steps >= 2
    assert 0 < clock.exchange_s < clock.step_s
