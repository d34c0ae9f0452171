"""What tests with several processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from train.launcher import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    with Launcher() as started:
        yield started
