"""Tokenizers: trained, loaded, refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from allmlp.data.tokenizer import SPECIAL, Tokenize, Tokenizer, load
from allmlp.errors import UserError

tokenizers = pytest.importorskip("tokenizers")
TEXT = ["The quick brown fox jumps over the lazy dog.", "Unbelievable foxes jumping, jumped, jump!"] * 20


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_trained_saved_and_read_again(algorithm: str, lowercase: bool, tmp_path: Path) -> None:
    made = Tokenize(algorithm, 300, lowercase).build(TEXT)
    assert [made.word(number) for number in (made.pad, made.unknown, made.first, made.last, made.mask)] == list(SPECIAL)
    (tmp_path / "tokenizer.json").write_text(made.to_json())
    again = Tokenize(path=str(tmp_path)).build([])
    sentence = "The quick fox jumped"
    (ids,) = made.encode([sentence])
    assert again == made and again.encode([sentence]) == [ids] and len(again) <= 300
    assert made.decode(ids).strip() == (sentence.lower() if lowercase else sentence)
    assert made.decode([made.first, *ids, made.last, made.pad]) == made.decode(ids)
    assert made.encode(["[MASK]"]) == [[made.mask]]
    assert made.special.sum() == 5 and not made.special[ids].any()


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_words_and_their_pieces(algorithm: str) -> None:
    made = Tokenize(algorithm, 60 if algorithm != "bpe" else 300).build(TEXT)
    (ids,) = made.encode(["unbelievable foxes"])
    assert len(ids) > 2 and (~made.continues[ids]).sum() == 2 and not made.continues[ids[0]]


def test_half_a_pair_of_surrogates_is_a_question_mark() -> None:
    made = Tokenize(vocabulary=200).build(TEXT)
    assert made.encode(["half \ud83d", "the fox"]) == made.encode(["half ?", "the fox"])
    assert made.spans("half \ud83d") == made.spans("half ?")


def test_offsets_point_into_the_text() -> None:
    made = Tokenize(vocabulary=200).build(TEXT)
    text = "The 🦊 fox, שלום jumps"
    _, spans = made.spans(text)
    assert [text[a:b].lower() for a, b in spans if text[a:b] in ("The", "fox", ",")] == ["the", "fox", ","]
    assert spans[-1][1] == len(text)


def test_a_vocabulary_of_bert(tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join([*SPECIAL, "the", "fox", "##es"]) + "\n")
    made = load(tmp_path)
    assert made.encode(["The foxes"]) == [[5, 6, 7]] and made.continues.tolist() == [False] * 7 + [True]
    file.write_text("")
    with pytest.raises(UserError, match=r"the vocabulary .*vocab\.txt is empty"):
        load(file)
    for lines, reason in (([*SPECIAL, "the", "of", "the"], "has 'the' twice"), (SPECIAL, "has no words")):
        file.write_text("\n".join(lines))
        with pytest.raises(UserError, match=reason):
            load(file)
    file.write_text("the\nfox\n")
    with pytest.raises(UserError, match=r"has no \[PAD\]"):
        load(file)


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has neither tokenizer\.json nor vocab\.txt"):
        load(tmp_path)
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        load(tmp_path / "nothing.json")
    (tmp_path / "tokenizer.json").write_text('{"version": 1}')
    with pytest.raises(UserError, match="is not a tokenizer"):
        load(tmp_path)
    with pytest.raises(UserError, match="cannot train a tokenizer"):
        Tokenize().build(["", "  "])
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(UserError, match="the tokenizer has no"):
        Tokenizer(plain)
