"""Tokenizers, trained or loaded, saved as tokenizer.json next to the model."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.dataset import Data, Dataset
from allmlp.data.paths import cache_folder, write_once
from allmlp.data.preprocessing import PREPROCESSING_FILE, TextPreprocessing
from allmlp.errors import UserError, one_line, require
from allmlp.files import expand_user, write_text_atomically
from allmlp.spec import Count, Spec, to_json

TOKENIZER_FILE = "tokenizer.json"
PAD_TOKEN, UNK_TOKEN, CLS_TOKEN, SEP_TOKEN, MASK_TOKEN = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

START_TOKENS, END_TOKENS = ("<|begin_of_text|>", "<s>", "<|endoftext|>"), ("<|end_of_text|>", "</s>", "<|endoftext|>")
"""Tokens used as [CLS] and [SEP] in tokenizers of Llama and GPT-2, which have no other special tokens that are used."""
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")
"""Tokens that end a turn of models trained for conversations."""

MAX_WORD = 1000
"""Maximum number of characters of a word in tokenizer training."""
LONG_WORD = re.compile(rf"\S{{{MAX_WORD + 1},}}")
MAX_GROWTH = 64
"""Maximum factor by which a tokenizer's normalizers may lengthen a text."""


class TokenizerConfig(Spec):
    """A tokenizer to train, or to load from `path`: a tokenizer.json, a BERT vocab.txt, or a folder with either."""

    algorithm: Literal["wordpiece", "bpe", "unigram"] = "wordpiece"
    vocab_size: Count = 8192
    lowercase: bool = True
    max_documents: Count = 100_000
    """Number of documents to train on, starting with the first."""
    limit_alphabet: Count = 1000
    """Maximum number of characters in a WordPiece vocabulary, with two tokens each; words with others are unknown."""
    path: str = ""

    def build(self, texts: Iterable[str]) -> Tokenizer:
        return load_tokenizer(self.path) if self.path else train_tokenizer(self, texts)

    def build_cached(self, texts: list[str], cache: str = "") -> Tokenizer:
        """Like `build`, but trained once per set of texts and kept in `cache` ($ALLMLP_CACHE, ~/.cache/allmlp).

        Training is not deterministic, so other processes and resumed runs must load the same file.
        """
        if self.path:
            return load_tokenizer(self.path)
        key = hashlib.sha256(repr(self).encode())
        for text in texts:
            key.update(text.encode("utf8", "replace") + b"\0")
        file = cache_folder(cache) / "tokenizers" / f"{key.hexdigest()[:24]}.json"
        write_once(file, lambda: write_text_atomically(file, train_tokenizer(self, texts).to_json()))
        return load_tokenizer(file)


class TextData(Data, abstract=True):
    """Text with a field `tokenizer`; when a run starts from a model, that model's tokenizer is used."""

    def load_test(self, tokenizer: Tokenizer) -> Dataset:
        """The test examples alone, for a trained model; they stand in for the training split."""
        raise NotImplementedError

    def for_model(self, folder: str) -> Self:
        config: TokenizerConfig = self.tokenizer  # type: ignore[attr-defined]
        return self if config.path else self.replace(tokenizer=config.replace(path=folder))


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which tokenizers refuse, by question marks."""
    return text.encode("utf8", "replace").decode("utf8")


@contextmanager
def one_line_failures(what: str = "the tokenizer fails on this text") -> Iterator[None]:
    """Turn failures of the library into UserError: plain Exceptions, for example for a missing [UNK], and Rust panics,
    which are not Exceptions, for example for a regular expression that takes too long.
    """
    try:
        yield
    except BaseException as reason:
        if type(reason) is not Exception and type(reason).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {one_line(reason)}") from None


def growth(part: Any) -> float:
    """Maximum factor by which the normalizers of a tokenizer.json lengthen a text, each replacing single characters."""
    if isinstance(part, list):
        return math.prod(map(growth, part))
    if not isinstance(part, dict):
        return 1.0
    factor = 1.0
    if part.get("type") == "Replace" and isinstance(part.get("pattern"), dict):
        # A regular expression may match the empty text before every character.
        content, pattern = str(part.get("content", "")), str(part["pattern"].get("String", ""))
        factor = max(len(content) / len(pattern), 1.0) if pattern else len(content) + 1.0
    return factor * math.prod(growth(inner) for inner in part.values() if isinstance(inner, (dict, list)))


class Tokenizer:
    """A Hugging Face tokenizer with the ids of its special tokens: `pad_token_id`, `cls_token_id`, ..."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        ids: dict[str, Any] = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
        start, end = (self.first_id(tokens) for tokens in (START_TOKENS, END_TOKENS))
        if set(ids.values()) == {None} and start is not None and end is not None:
            ids.update(dict.fromkeys(SPECIAL_TOKENS, end) | {CLS_TOKEN: start, MASK_TOKEN: None})
        elif missing := [token for token in SPECIAL_TOKENS if ids[token] is None]:
            raise UserError(f"the tokenizer has no {', '.join(missing)}; it needs {', '.join(SPECIAL_TOKENS)}")
        self.pad_token_id, self.unk_token_id, self.cls_token_id, self.sep_token_id, self._mask_token_id = ids.values()
        self.special_ids = {number for number in ids.values() if number is not None}
        self.stop_token_ids = {self.sep_token_id} | {tokenizer.token_to_id(token) for token in TURN_ENDS} - {None}

    def first_id(self, tokens: Iterable[str]) -> int | None:
        """The id of the first of these tokens that the vocabulary has."""
        return next((number for token in tokens if (number := self.tokenizer.token_to_id(token)) is not None), None)

    @property
    def mask_token_id(self) -> int:
        if self._mask_token_id is None:
            raise UserError(f"the tokenizer of a causal language model has no {MASK_TOKEN}; use one that has")
        return self._mask_token_id

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without [CLS] and [SEP]. A [PAD] in the text is unknown, not padding."""
        with one_line_failures():
            try:
                encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            except TypeError:
                texts = [*map(replace_surrogates, texts)]
                encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self.without_padding(one.ids) for one in encodings]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text, as in `encode`, and the (start, end) characters of each."""
        with one_line_failures():
            encoding = self.tokenizer.encode(replace_surrogates(text), add_special_tokens=False)
        return self.without_padding(encoding.ids), encoding.offsets

    def without_padding(self, ids: list[int]) -> list[int]:
        pad, unknown = self.pad_token_id, self.unk_token_id
        return [unknown if number == pad else number for number in ids] if pad in ids else ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def id_to_token(self, token_id: int) -> str:
        return self.tokenizer.id_to_token(token_id)

    def token_text(self, token_id: int) -> str:
        """A token as people read it: one of bytes is decoded, if its bytes are whole characters."""
        token = self.id_to_token(token_id) or ""
        if type(self.tokenizer.decoder).__name__ != "ByteLevel":
            return token
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return token if "\ufffd" in text else text

    def starts(self, ids: Tensor) -> Tensor:
        """Whether each token, b s, is the [CLS] of a text; if it is the same token as [SEP], the one after a [SEP] or
        first in the row.
        """
        is_cls = ids == self.cls_token_id
        if self.cls_token_id != self.sep_token_id:
            return is_cls
        return is_cls & F.pad(is_cls[:, :-1], (1, 0), value=True) & ~F.pad(is_cls[:, 1:], (0, 1), value=True)

    def padding(self, ids: Tensor) -> Tensor:
        """Whether each token, b s, is padding; if [PAD] is the same token as [SEP], one that follows another."""
        is_pad = ids == self.pad_token_id
        if self.pad_token_id != self.sep_token_id:
            return is_pad
        return is_pad & F.pad(is_pad[:, :-1], (1, 0)) & ~self.starts(ids)

    @cached_property
    def special_tokens_mask(self) -> Tensor:
        """True for the special tokens: bool, vocab_size."""
        table = torch.zeros(len(self), dtype=torch.bool)
        table[sorted(self.special_ids)] = True
        return table

    @cached_property
    def continuation_mask(self) -> Tensor:
        """True for tokens that continue a word: bool, vocab_size."""
        words = [self.id_to_token(number) or "" for number in range(len(self))]
        if any(word.startswith("##") for word in words):
            return torch.tensor([word.startswith("##") for word in words])
        if any(word[:1] in ("Ġ", "▁") for word in words):
            return torch.tensor([word[:1] not in ("Ġ", "▁") and word not in SPECIAL_TOKENS for word in words])
        return torch.zeros(len(self), dtype=torch.bool)

    def to_json(self) -> str:
        return self.tokenizer.to_str()

    def files(self, preprocessing: TextPreprocessing) -> dict[str, str]:
        """Name -> text of the files that are saved next to a model that reads text with this tokenizer."""
        return {TOKENIZER_FILE: self.to_json(), PREPROCESSING_FILE: to_json(preprocessing)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]


def train_tokenizer(spec: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    tokenizers = require("tokenizers", "text")
    normalizers, splitters, trainers = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.trainers
    options = {"vocab_size": spec.vocab_size, "special_tokens": list(SPECIAL_TOKENS), "show_progress": False}
    if spec.algorithm == "wordpiece":
        tokenizer = wordpiece(tokenizers.models.WordPiece(unk_token=UNK_TOKEN), spec.lowercase)
        trainer = trainers.WordPieceTrainer(limit_alphabet=spec.limit_alphabet, **options)
    elif spec.algorithm == "bpe":
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.normalizer = normalizers.Lowercase() if spec.lowercase else normalizers.Sequence([])
        tokenizer.pre_tokenizer = splitters.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=splitters.ByteLevel.alphabet(), **options)
    else:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
        steps = [normalizers.NFKC(), *([normalizers.Lowercase()] if spec.lowercase else [])]
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.pre_tokenizer = splitters.Metaspace()
        tokenizer.decoder = tokenizers.decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token=UNK_TOKEN, **options)
    try:
        shortened = (shorten_words(replace_surrogates(text)) for text in islice(texts, spec.max_documents))
        tokenizer.train_from_iterator((text for text in shortened if text.strip()), trainer)
    except UserError:  # of the reader
        raise
    except Exception as reason:  # the trainers raise plain exceptions
        raise UserError(f"cannot train a tokenizer on this text: {one_line(reason)}") from reason
    if tokenizer.get_vocab_size() <= len(SPECIAL_TOKENS):
        raise UserError("cannot train a tokenizer: the text is empty")
    return Tokenizer(tokenizer)


def shorten_words(text: str) -> str:
    """Remove overlong words: training time grows quadratically with the length of a word."""
    return LONG_WORD.sub(" ", text) if len(text) > MAX_WORD else text


def wordpiece(model: Any, lowercase: bool) -> Any:
    """A WordPiece tokenizer with BERT's normalization and splitting."""
    tokenizers = require("tokenizers", "text")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer.json, a BERT vocabulary with one token per line, or a folder with either."""
    tokenizers = require("tokenizers", "text")
    path = expand_user(path)
    if path.is_dir():
        files = [path / name for name in (TOKENIZER_FILE, "vocab.txt") if (path / name).is_file()]
        if not files:
            raise UserError(f"{path} has neither {TOKENIZER_FILE} nor vocab.txt")
        path = files[0]
    try:
        text = path.read_text(encoding="utf8")
    except (OSError, UnicodeError) as reason:
        raise UserError(f"cannot read the tokenizer {path}: {one_line(reason)}") from None
    if path.suffix == ".json":
        return parse_tokenizer(text, str(path))
    words = text.split("\n")
    words = words[:-1] if words[-1] == "" else words
    if not words:
        raise UserError(f"the vocabulary {path} is empty")
    numbers = {word.rstrip("\r"): number for number, word in enumerate(words)}
    if len(numbers) < len(words):
        duplicate = next(word for number, word in enumerate(words) if numbers[word.rstrip("\r")] != number)
        raise UserError(f"the vocabulary {path} has {duplicate!r} twice")
    if set(numbers) <= set(SPECIAL_TOKENS):
        raise UserError(f"the vocabulary {path} has no words")
    cased = any(word != word.lower() for word in numbers if word not in SPECIAL_TOKENS)
    model = tokenizers.models.WordPiece(numbers, unk_token=UNK_TOKEN)
    tokenizer = wordpiece(model, lowercase="uncased" in path.name or not cased)
    tokenizer.add_special_tokens([token for token in SPECIAL_TOKENS if token in numbers])
    return Tokenizer(tokenizer)


def parse_tokenizer(text: str, name: str) -> Tokenizer:
    try:
        with one_line_failures(f"{name} is not a tokenizer"):
            tokenizer = require("tokenizers", "text").Tokenizer.from_str(text)
        normalizer = json.loads(text).get("normalizer")
    except UserError:
        raise
    except (AttributeError, TypeError, ValueError) as reason:
        raise UserError(f"{name} is not a tokenizer: {one_line(reason)}") from None
    if (times := growth(normalizer)) > MAX_GROWTH:
        raise UserError(f"{name} may make a text {times:,.0f} times as long, more than {MAX_GROWTH}: it is not used")
    return Tokenizer(tokenizer)
