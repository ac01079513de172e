"""Several nodes: the launcher with a hostfile, over ssh, and a host that is cut off in the middle of a stream."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.e2e.two_hosts import (
    ADDRESSES,
    QUESTION,
    ServedByTwo,
    TwoHosts,
    hostfile_command,
    missing,
    slurm_command,
    smollm2_config,
    text_of,
    two_hosts,
)

LIMIT_S = 30.0


def hosts_or_skip(directory: Path) -> AbstractContextManager[TwoHosts]:
    problem = missing()
    if problem is not None:
        pytest.skip(problem)
    return two_hosts(directory)


@pytest.mark.slow
def test_the_slurm_script(smollm2: Path, tmp_path: Path) -> None:
    """With stand-ins for Slurm's own commands, from another directory than the checkout."""
    with hosts_or_skip(tmp_path) as hosts:
        served = ServedByTwo(hosts, smollm2_config(smollm2), slurm_command)
        served.wait_ready()
        assert "Paris" in text_of(served.stream(QUESTION | {"stream": True}).communicate(timeout=120)[0])


@pytest.mark.slow
def test_a_model_on_two_hosts_and_a_cable_that_is_pulled(smollm2: Path, tmp_path: Path) -> None:
    with hosts_or_skip(tmp_path) as hosts:
        served = ServedByTwo(hosts, smollm2_config(smollm2), hostfile_command)
        served.wait_ready()
        assert "Paris" in text_of(served.stream(QUESTION | {"stream": True}).communicate(timeout=120)[0])
        client = served.stream(QUESTION | {"stream": True, "ignore_eos": True, "max_tokens": 900})
        assert client.stdout is not None
        for _ in range(20):
            assert client.poll() is None
            client.stdout.readline()
        hosts.pull_the_cable()
        ranks_s, _ = served.wait_ended(2 * LIMIT_S)
        assert ranks_s < LIMIT_S
        assert served.process.returncode not in (0, None)
        for rank, address in ((1, ADDRESSES[1]), (0, ADDRESSES[0])):
            assert f"rank {rank} on {address} stopped answering" in served.log()
        rest, _ = client.communicate(timeout=LIMIT_S)
        assert "[DONE]" not in rest
