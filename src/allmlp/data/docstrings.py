"""Text that comes along with Python: the docstrings of its standard library."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from allmlp.data.corpus import Corpus, Texts, build
from allmlp.data.tokenizer import TextData, Tokenize
from allmlp.errors import UserError
from allmlp.spec import Count, Rate


class Docstrings(TextData):
    """Some megabytes of technical English, the same for everyone with the same version of Python."""

    tokenize: Tokenize = Tokenize(vocabulary=4096)
    length: Count = 64
    held: Rate = 0.05
    cache: str = ""

    def open(self) -> Texts:
        corpus = Corpus("", tokenize=self.tokenize, length=self.length, held=self.held, cache=self.cache)
        return build(corpus, [f"docstrings of Python {sys.version}"], docstrings, None)


@cache
def docstrings() -> tuple[str, ...]:
    """They are asked for twice, for the vocabulary and for the tokens, and parsing takes a while."""
    return tuple(parse())


def parse() -> Iterator[str]:
    """One document per module, class and function that has more than a few words."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file for file in sorted(root.rglob("*.py")) if "site-packages" not in file.parts and "test" not in file.parts
    ]
    if not files:
        raise UserError(f"there are no sources of Python's library in {root}")
    for file in files:
        try:
            tree = ast.parse(file.read_text(encoding="utf8"))
        except (SyntaxError, UnicodeError, ValueError, OSError):
            continue  # files that are wrong on purpose
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) > 80:
                    yield text
