"""The command, run in the process of the tests."""

from __future__ import annotations

import pytest

from allmlp.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `allmlp ARGUMENTS`."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0), *capsys.readouterr()
