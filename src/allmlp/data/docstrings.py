"""The docstrings of Python's standard library, a text corpus without a download."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from allmlp.data.corpus import Corpus, TextDataset, load_corpus
from allmlp.data.tokenizer import TextData, TokenizerConfig
from allmlp.errors import UserError
from allmlp.spec import Count, Rate


class Docstrings(TextData):
    """A few megabytes of technical English, identical for the same version of Python."""

    tokenizer: TokenizerConfig = TokenizerConfig(vocab_size=4096)
    seq_len: Count = 64
    test_fraction: Rate = 0.05
    cache: str = ""

    def load(self) -> TextDataset:
        fields = ("tokenizer", "seq_len", "test_fraction", "cache")
        corpus = Corpus("", **{field: getattr(self, field) for field in fields})
        return load_corpus(corpus, [f"docstrings of Python {sys.version}"], docstrings, None)


@cache
def docstrings() -> tuple[str, ...]:
    """Cached, because vocabulary and tokens both need them and parsing is slow."""
    return tuple(iter_docstrings())


def iter_docstrings() -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions with more than 80 characters."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "test")]  # large: not entered
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise UserError(f"the sources of Python's standard library are not in {root}")
    for file in sorted(files):
        try:
            tree = ast.parse(file.read_text(encoding="utf8"))
        except (SyntaxError, UnicodeError, ValueError, OSError):
            continue  # some test files are invalid on purpose
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) > 80:
                    yield text
