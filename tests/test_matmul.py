"""Which library multiplies matrices on which CPU."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from allmlp.matmul import VARIABLE, choose_library

CORE = """processor\t: {}
BogoMIPS\t: 50.00
CPU implementer\t: {}
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: {}
CPU revision\t: 1

"""


def cores(implementer: str, part: str) -> str:
    return "".join(CORE.format(number, implementer, part) for number in range(2))


@pytest.mark.parametrize(
    ("machine", "text", "chosen"),
    [
        ("aarch64", cores("0x41", "0xd0c"), True),
        ("aarch64", cores("0x41", "0xd40"), False),  # Neoverse V1
        ("aarch64", cores("0x61", "0xd0c"), False),  # of another company
        ("x86_64", cores("0x41", "0xd0c"), False),
        ("aarch64", None, False),
    ],
)
def test_openblas_on_neoverse_n1_alone(
    machine: str, text: str | None, chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(os, "environ", {})
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text, encoding="utf8")
    choose_library(file)
    assert (VARIABLE in os.environ) == chosen


def test_a_value_that_is_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(os, "environ", {VARIABLE: "8"})
    (tmp_path / "cpuinfo").write_text(cores("0x41", "0xd0c"), encoding="utf8")
    choose_library(tmp_path / "cpuinfo")
    assert os.environ == {VARIABLE: "8"}
