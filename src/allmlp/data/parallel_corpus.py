"""Parallel text for translation: tables with a column per language, or pairs of files with aligned lines."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.data.dataset import Dataset, InMemory
from allmlp.data.preprocessing import TextPreprocessing
from allmlp.data.splits import group_by_keys, split_by_group
from allmlp.data.tables import SEPARATORS, read_separated, read_table, sniff, table_suffix, test_names
from allmlp.data.text_files import exists, find_files, open_text, split_commas
from allmlp.data.tokenizer import TextData, Tokenizer, TokenizerConfig
from allmlp.errors import UserError, did_you_mean
from allmlp.files import expand_user
from allmlp.spec import Count, NonNegative, Rate, Seed

log = logging.getLogger("allmlp.data")

ENCODE_BATCH = 8192
"""Pairs tokenized at once."""


class TranslationBatch(NamedTuple):
    source: Tensor
    """int32, b s: x1 ... xn [SEP], padded on the right."""
    target: Tensor
    """int32, b t: [CLS] y1 ... yn [SEP], padded on the right."""
    reference_index: Tensor
    """int32, b: index of the target in `TranslationDataset.references`."""


@dataclass(frozen=True)
class TranslationDataset(Dataset):
    """Sentences and their translations."""

    tokenizer: Tokenizer
    seq_len: int
    references: tuple[str, ...]
    """The target texts of all splits."""
    source_lang: str
    tokens_per_pair: int
    """Mean number of tokens of a training pair, both sides together, without padding."""
    test_sets: tuple[tuple[str, int], ...] = ()
    """Where there are several test files: their names, and the `reference_index` at which each begins."""

    def files(self) -> dict[str, str]:
        return self.tokenizer.files(TextPreprocessing("translation", self.seq_len, text_columns=(self.source_lang,)))


class ParallelCorpus(TextData):
    """Sentence pairs for training (`path`), validation (`val`) and testing (`test`), files as in `find_files`.

    Several test files, separated by commas, are evaluated one by one. `source_lang` and `target_lang` are columns of
    tables (`data.tables`). Two files with aligned lines are joined by a plus sign: train.de+train.en. Without `test`,
    `test_fraction` of the pairs are held out for testing, and without `val` as many for validation; equal sources stay
    together. Pairs with an empty side are skipped, and so are training pairs with more than `seq_len` tokens including
    [CLS] and [SEP], or with one side more than `max_length_ratio` times as long as the other. Sources for validation
    and testing are truncated. Both languages use one tokenizer, which is kept in `cache` ($ALLMLP_CACHE,
    ~/.cache/allmlp).
    """

    path: str
    test: str = ""
    source_lang: str = "de"
    target_lang: str = "en"
    tokenizer: TokenizerConfig = TokenizerConfig("bpe", 8192, lowercase=False)
    seq_len: Count = 64
    max_length_ratio: NonNegative | None = None
    val: str = ""
    test_fraction: Rate = 0.02
    split_seed: Seed = 0
    cache: str = ""

    def check(self) -> None:
        if self.seq_len < 3:
            raise UserError("a target needs at least three tokens: [CLS], one of the text, [SEP]; raise data.seq_len")
        if self.source_lang == self.target_lang:
            raise UserError(f"source_lang and target_lang are the same column, {self.source_lang!r}: name two")
        if self.max_length_ratio is not None and self.max_length_ratio < 1:
            raise UserError(
                f"max_length_ratio={self.max_length_ratio:g} would skip every pair: it must be at least 1, or none"
            )

    def load(self) -> TranslationDataset:
        train_pairs = self.read_pairs(self.path)
        val_pairs = self.read_pairs(self.val) if self.val else []
        tests = self.read_tests() if self.test else []
        test_pairs = [pair for _, pairs in tests for pair in pairs]
        notes: tuple[str, ...] = ()
        if not test_pairs:
            made = self.split(train_pairs, 0.0 if val_pairs else self.test_fraction)
            train_pairs, val_pairs, test_pairs = made[0], val_pairs or made[1], made[2]
            counts = f"{len(train_pairs):,} train, {len(val_pairs):,} validation, {len(test_pairs):,} test"
            notes = (f"split with seed {self.split_seed}: {counts}",)
        tokenizer = self.tokenizer.build_cached([text for pair in train_pairs for text in pair], self.cache)
        kept, train = self.filter_pairs(train_pairs, tokenizer)
        references = tuple(target for _, target in kept + val_pairs + test_pairs)
        real = int((train != tokenizer.pad_token_id).sum())
        return TranslationDataset(
            InMemory(*train, numbered(0, len(kept)), batch_type=TranslationBatch),
            self.encode(test_pairs, len(kept) + len(val_pairs), tokenizer),
            tokenizer,
            self.seq_len,
            references,
            self.source_lang,
            max(round(real / len(kept)), 1),
            test_sets=test_sets(tests, len(kept) + len(val_pairs)),
            validation=self.encode(val_pairs, len(kept), tokenizer) if val_pairs else None,
            notes=notes,
        )

    def load_test(self, tokenizer: Tokenizer) -> TranslationDataset:
        tests = self.read_tests()
        pairs = [pair for _, file_pairs in tests for pair in file_pairs]
        test, references = self.encode(pairs, 0, tokenizer), tuple(target for _, target in pairs)
        return TranslationDataset(
            test, test, tokenizer, self.seq_len, references, self.source_lang, 0, test_sets=test_sets(tests, 0)
        )

    def read_tests(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Every test file with its pairs."""
        return [(path, self.read_pairs(path)) for path in split_paths(self.test) or [""]]

    def encode(self, pairs: list[tuple[str, str]], first: int, tokenizer: Tokenizer) -> InMemory:
        """The split of these pairs, whose references are numbered from `first`."""
        ids = torch.cat([rows(ids, tokenizer, self.seq_len) for ids in encode(pairs, tokenizer)], dim=1)
        return InMemory(*ids, numbered(first, len(pairs)), batch_type=TranslationBatch)

    def split(self, pairs: list[tuple[str, str]], val_fraction: float) -> list[list[tuple[str, str]]]:
        """Pairs for training, validation and testing."""
        sources = [source for source, _ in pairs]
        groups = group_by_keys([source] for source in sources)
        indices_of = split_by_group(
            [0] * len(pairs), groups, sources, val_fraction, self.test_fraction, self.split_seed
        )
        return [[pairs[index] for index in indices] for indices in indices_of]

    def read_pairs(self, paths: str) -> list[tuple[str, str]]:
        """Read the pairs without an empty side."""
        pairs: list[tuple[str, str]] = []
        half = 0
        for source, target in read(paths, self.source_lang, self.target_lang):
            if source and target:
                pairs.append((source, target))
            half += bool(source) != bool(target)
        if not pairs:
            raise UserError(f"{paths} has no pairs of sentences" if paths else "set data.path and data.test to files")
        if half:
            log.warning("%s: skipped %d pairs with an empty sentence", paths, half)
        return pairs

    def filter_pairs(self, pairs: list[tuple[str, str]], tokenizer: Tokenizer) -> tuple[list[tuple[str, str]], Tensor]:
        """The training pairs that are kept, and their token ids, 2 b s."""
        skipped: Counter[str] = Counter()
        kept, pieces = [], []
        for start, encoded in zip(range(0, len(pairs), ENCODE_BATCH), encode(pairs, tokenizer)):
            batch_reasons = [self.skip_reason(*pair) for pair in encoded]
            skipped.update(filter(None, batch_reasons))
            kept += [pair for pair, reason in zip(pairs[start : start + ENCODE_BATCH], batch_reasons) if not reason]
            pieces.append(
                rows([pair for pair, reason in zip(encoded, batch_reasons) if not reason], tokenizer, self.seq_len)
            )
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        if not kept:
            raise UserError(
                f"{self.path}: no training pair is left, {reasons}; change data.seq_len or data.max_length_ratio"
            )
        if skipped:
            log.warning("%s: skipped %d of %d pairs, %s", self.path, len(pairs) - len(kept), len(pairs), reasons)
        return kept, torch.cat(pieces, dim=1)

    def skip_reason(self, source: list[int], target: list[int]) -> str:
        """Reason to skip a training pair; empty to keep it."""
        shorter, longer = sorted((len(source), len(target)))
        if not shorter:
            return "without tokens"
        if len(source) + 1 > self.seq_len or len(target) + 2 > self.seq_len:
            return f"longer than {self.seq_len} tokens"
        if self.max_length_ratio is not None and longer > self.max_length_ratio * shorter:
            return f"with a length ratio above {self.max_length_ratio:g}"
        return ""


def test_sets(tests: list[tuple[str, list[tuple[str, str]]]], first: int) -> tuple[tuple[str, int], ...]:
    """Names of the test files, if there are several, and the index of the first pair of each."""
    if len(tests) < 2:
        return ()
    starts = accumulate((len(pairs) for _, pairs in tests), initial=first)
    return tuple(zip(test_names([path for path, _ in tests]), starts))


def numbered(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count, dtype=torch.int32)


def read(paths: str, source: str, target: str) -> Iterator[tuple[str, str]]:
    """Yield all pairs in order; a side may be empty."""
    for path in split_paths(paths):
        if "+" in path and not expand_user(path).exists():
            yield from read_aligned(*split_pair(path))
        else:
            for file in find_files(path):
                plain = table_suffix(file) in ("", ".tsv") and not is_quoted(file)
                yield from (read_tsv if plain else read_columns)(file, source, target)


def split_paths(paths: str) -> list[str]:
    """Comma-separated parts, some of which may be two files joined by a plus sign."""
    return split_commas(paths, lambda place: all(map(exists, split_pair(place))))


def split_pair(path: str) -> tuple[str, ...]:
    """The two files joined by a plus sign, existing ones if names contain one too; a path without it alone."""
    sides = path.split("+")
    pairs = [("+".join(sides[:count]), "+".join(sides[count:])) for count in range(1, len(sides))]
    return next((pair for pair in pairs if all(map(exists, pair))), pairs[0] if pairs else (path,))


def is_quoted(file: str) -> bool:
    """Whether the cells of a TSV file are quoted as by a CSV writer; if not, quotes belong to the sentences."""
    try:
        return sniff(file, "\t")[0].quoted
    except UserError:  # `read_tsv` says what is wrong
        return False


def read_tsv(file: str, source: str, target: str) -> Iterator[tuple[str, str]]:
    """Two columns of a TSV file; missing cells at the end of a row are empty."""
    rows = read_lines(file)
    header = [name.strip() for name in next(rows, "").split("\t")]
    if not any(header):
        raise UserError(f"{file} has no pairs of sentences: its first line must name the columns")
    check_languages(file, header, source, target)
    left, right = header.index(source), header.index(target)
    for number, row in enumerate(rows, 2):
        cells = row.split("\t")
        if len(cells) > len(header):
            raise UserError(f"{file}, line {number}: {len(cells)} columns instead of {len(header)}")
        cells += [""] * (len(header) - len(cells))
        yield cells[left].strip(), cells[right].strip()


def read_columns(file: str, source: str, target: str) -> Iterator[tuple[str, str]]:
    """Two columns of a table with quotes, or in another format."""
    table = read_table(file) if table_suffix(file) else read_separated(file, SEPARATORS[".tsv"])
    check_languages(file, table.columns, source, target)
    for row in table:
        yield row[source].strip(), row[target].strip()


def check_languages(file: str, columns: Sequence[str], source: str, target: str) -> None:
    for name, field in ((source, "source_lang"), (target, "target_lang")):
        if name not in columns:
            hint = did_you_mean(name, columns) or f", only {', '.join(columns)}"
            raise UserError(f"{file} has no column {name!r} (set data.{field} to another){hint}")


def read_aligned(source: str, target: str) -> Iterator[tuple[str, str]]:
    """Aligned lines of two files, or of equally many files on both sides."""
    sources, targets = find_files(source), find_files(target)
    if len(sources) != len(targets):
        raise UserError(f"{source} has {len(sources)} files and {target} has {len(targets)}: both need the same number")
    for left, right in zip(sources, targets):
        for number, (a, b) in enumerate(zip_longest(read_lines(left), read_lines(right))):
            if a is None or b is None:
                ended = left if a is None else right
                raise UserError(f"{left} and {right} are not aligned: {ended} ends after line {number}")
            yield a.strip(), b.strip()


def read_lines(file: str) -> Iterator[str]:
    """Lines without line ends; invalid UTF-8 becomes U+FFFD."""
    with open_text(file) as text:
        for line in text:
            yield line.rstrip("\r\n")


EncodedPairs = list[tuple[list[int], list[int]]]


def encode(pairs: list[tuple[str, str]], tokenizer: Tokenizer) -> Iterator[EncodedPairs]:
    """Token ids of both sides, without [CLS] and [SEP], in batches of pairs."""
    for start in range(0, len(pairs), ENCODE_BATCH):
        sources, targets = zip(*pairs[start : start + ENCODE_BATCH])
        yield list(zip(tokenizer.encode(list(sources)), tokenizer.encode(list(targets))))


def rows(encoded: EncodedPairs, tokenizer: Tokenizer, seq_len: int) -> Tensor:
    """Padded rows of sources and targets, 2 b s."""
    sources = [source_ids(source, tokenizer, seq_len) for source, _ in encoded]
    # A truncated target has no [SEP].
    targets = [[tokenizer.cls_token_id, *target, tokenizer.sep_token_id][:seq_len] for _, target in encoded]
    padded = [[row + [tokenizer.pad_token_id] * (seq_len - len(row)) for row in side] for side in (sources, targets)]
    return torch.tensor(padded, dtype=torch.int32).view(2, len(encoded), seq_len)


def source_ids(ids: list[int], tokenizer: Tokenizer, seq_len: int) -> list[int]:
    """Ids of a source as the encoder reads them, truncated if too long."""
    return [*ids[: seq_len - 1], tokenizer.sep_token_id]
