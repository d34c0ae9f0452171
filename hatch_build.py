"""Writes the commit into wheel and sdist, which `allmlp --version` prints and every run records."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root, "src")
        sys.path.insert(0, str(source))
        from allmlp.provenance import COMMIT_FILE, commit

        if version == "editable" or COMMIT_FILE.is_file() or not (found := commit()):
            return  # a checkout asks git, an unpacked sdist has the file
        self.folder = tempfile.TemporaryDirectory()
        file = Path(self.folder.name, COMMIT_FILE.name)
        file.write_text(f"{found}\n", encoding="utf8")
        inside = COMMIT_FILE.relative_to(source if self.target_name == "wheel" else self.root)
        build_data["force_include"][str(file)] = inside.as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()
