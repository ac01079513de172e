"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.e2e.served import Served, Starter


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    # Only here: the other tests of this directory run where the server's client is not installed.
    from tests.e2e.served import Served

    started: list[Served] = []

    def run(config: dict[str, Any], num_launched: int = 0) -> Served:
        started.append(Served(tmp_path_factory.mktemp("served"), config, num_launched))
        return started[-1]

    yield run
    for one in started:
        one.destroy()
