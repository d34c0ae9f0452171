"""Tokenizers: trained on one's own text or loaded, and always one JSON file beside the model."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from allmlp.data.source import Data
from allmlp.errors import UserError, one_line, require
from allmlp.files import write_atomically
from allmlp.spec import Count, Spec

FILE = "tokenizer.json"
PAD, UNKNOWN, FIRST, LAST, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Tokenize(Spec):
    """How text becomes tokens.

    With a `path` (a tokenizer.json, a BERT vocab.txt, or a folder that holds either) that tokenizer is used and nothing
    is trained.
    """

    algorithm: Literal["wordpiece", "bpe", "unigram"] = "wordpiece"
    vocabulary: Count = 8192
    lowercase: bool = True
    documents: Count = 100_000
    """How many, the first ones, a vocabulary is made from."""
    path: str = ""

    def build(self, texts: Iterable[str]) -> Tokenizer:
        return load(self.path) if self.path else train(self, texts)

    def kept(self, texts: list[str], cache: str = "") -> Tokenizer:
        """As `build`, but trained only once for these texts and kept in `cache` ($ALLMLP_CACHE, ~/.cache/allmlp):
        the trainers need not give the same vocabulary again to another process, or to a run that resumes.
        """
        if self.path:
            return load(self.path)
        key = hashlib.sha256(repr(self).encode())
        for text in texts:
            key.update(text.encode("utf8", "replace") + b"\0")
        file = cache_folder(cache) / "tokenizers" / f"{key.hexdigest()[:24]}.json"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            # One process trains it, the others of a run wait.
            with open(file.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not file.is_file():
                    json = train(self, texts).to_json()
                    write_atomically(file, lambda temporary: temporary.write_text(json, encoding="utf8"))
        except OSError as reason:
            raise UserError(
                f"cannot keep the tokenizer in {file.parent}: {one_line(reason)}; set data.cache"
            ) from reason
        return load(file)


class TextData(Data, abstract=True):
    """Text that is tokenised as its field `tokenize` says: a model to start from brings its own tokenizer."""

    def like(self, folder: str) -> Self:
        tokenize: Tokenize = self.tokenize  # type: ignore[attr-defined]
        return self if tokenize.path else self.replace(tokenize=tokenize.replace(path=folder))


def cache_folder(cache: str) -> Path:
    return Path(cache or os.environ.get("ALLMLP_CACHE") or "~/.cache/allmlp").expanduser()


def whole(text: str) -> str:
    """Half of a surrogate pair, which JSON and command lines may hold and no tokenizer reads, is a question mark."""
    return text.encode("utf8", "replace").decode("utf8")


class Tokenizer:
    """A Hugging Face tokenizer whose five special tokens are known: `tokenizer.pad`, `.first`, `.last`, `.mask`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        missing = [token for token in SPECIAL if tokenizer.token_to_id(token) is None]
        if missing:
            raise UserError(f"the tokenizer has no {', '.join(missing)}; it needs {', '.join(SPECIAL)}")
        self.pad, self.unknown, self.first, self.last, self.mask = map(tokenizer.token_to_id, SPECIAL)

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without [CLS] and [SEP]."""
        try:
            found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:
            found = self.tokenizer.encode_batch_fast([whole(text) for text in texts], add_special_tokens=False)
        return [one.ids for one in found]

    def spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text, and where each begins and ends in it."""
        found = self.tokenizer.encode(whole(text), add_special_tokens=False)
        return found.ids, found.offsets

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def word(self, number: int) -> str:
        return self.tokenizer.id_to_token(number)

    @cached_property
    def special(self) -> Tensor:
        """Whether a token is one of the five, which are never masked: vocabulary."""
        table = torch.zeros(len(self), dtype=torch.bool)
        table[[self.tokenizer.token_to_id(token) for token in SPECIAL]] = True
        return table

    @cached_property
    def continues(self) -> Tensor:
        """Whether a token goes on with the word before it: vocabulary."""
        words = [self.word(number) or "" for number in range(len(self))]
        if any(word.startswith("##") for word in words):
            return torch.tensor([word.startswith("##") for word in words])
        if any(word[:1] in ("Ġ", "▁") for word in words):
            return torch.tensor([word[:1] not in ("Ġ", "▁") and word not in SPECIAL for word in words])
        return torch.zeros(len(self), dtype=torch.bool)

    def to_json(self) -> str:
        return self.tokenizer.to_str()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]


def train(spec: Tokenize, texts: Iterable[str]) -> Tokenizer:
    tokenizers = require("tokenizers", "text")
    normalizers, splitters, trainers = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.trainers
    options = {"vocab_size": spec.vocabulary, "special_tokens": list(SPECIAL), "show_progress": False}
    if spec.algorithm == "wordpiece":
        tokenizer = word_pieces(tokenizers.models.WordPiece(unk_token=UNKNOWN), spec.lowercase)
        trainer = trainers.WordPieceTrainer(limit_alphabet=1000, **options)
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
        trainer = trainers.UnigramTrainer(unk_token=UNKNOWN, **options)
    try:
        tokenizer.train_from_iterator((text for text in islice(texts, spec.documents) if text.strip()), trainer)
    except Exception as reason:  # the trainers raise plain exceptions, for instance on too little text
        raise UserError(f"cannot train a tokenizer on this text: {one_line(reason)}") from reason
    if tokenizer.get_vocab_size() <= len(SPECIAL):
        raise UserError("cannot train a tokenizer: the text is empty")
    return Tokenizer(tokenizer)


def word_pieces(model: Any, lowercase: bool) -> Any:
    """BERT's way: cleaned, perhaps lower case, cut at spaces and punctuation."""
    tokenizers = require("tokenizers", "text")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    return tokenizer


def load(path: str | Path) -> Tokenizer:
    """The tokenizer in a JSON file, in a BERT vocabulary of one token a line, or in a folder with either."""
    tokenizers = require("tokenizers", "text")
    place = Path(path).expanduser()
    if place.is_dir():
        found = [place / name for name in (FILE, "vocab.txt") if (place / name).is_file()]
        if not found:
            raise UserError(f"{place} has neither {FILE} nor vocab.txt")
        place = found[0]
    try:
        text = place.read_text(encoding="utf8")
    except (OSError, UnicodeError) as reason:
        raise UserError(f"cannot read the tokenizer {place}: {one_line(reason)}") from None
    if place.suffix == ".json":
        return parse(text, str(place))
    words = text.split("\n")
    words = words[:-1] if words[-1] == "" else words
    if not words:
        raise UserError(f"the vocabulary {place} is empty")
    numbers = {word.rstrip("\r"): number for number, word in enumerate(words)}
    if len(numbers) < len(words):
        twice = next(word for number, word in enumerate(words) if numbers[word.rstrip("\r")] != number)
        raise UserError(f"the vocabulary {place} has {twice!r} twice")
    if set(numbers) <= set(SPECIAL):
        raise UserError(f"the vocabulary {place} has no words")
    model = tokenizers.models.WordPiece(numbers, unk_token=UNKNOWN)
    tokenizer = word_pieces(
        model,
        lowercase="uncased" in place.name or not any(word != word.lower() for word in numbers if word not in SPECIAL),
    )
    tokenizer.add_special_tokens([token for token in SPECIAL if token in numbers])
    return Tokenizer(tokenizer)


def parse(text: str, name: str) -> Tokenizer:
    try:
        found = require("tokenizers", "text").Tokenizer.from_str(text)
    except Exception as reason:  # a plain exception, with the parser's message
        raise UserError(f"{name} is not a tokenizer: {one_line(reason)}") from None
    return Tokenizer(found)
