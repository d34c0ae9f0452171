"""Tokenizers: training, loading, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from allmlp.data.tokenizer import SPECIAL_TOKENS, Tokenizer, TokenizerConfig, load_tokenizer
from allmlp.errors import UserError

tokenizers = pytest.importorskip("tokenizers")
TEXT = ["The quick brown fox jumps over the lazy dog.", "Unbelievable foxes jumping, jumped, jump!"] * 20


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_trained_saved_and_read_again(algorithm: str, lowercase: bool, tmp_path: Path) -> None:
    made = TokenizerConfig(algorithm, 300, lowercase).build(TEXT)
    assert [
        made.id_to_token(number)
        for number in (made.pad_token_id, made.unk_token_id, made.cls_token_id, made.sep_token_id, made.mask_token_id)
    ] == list(SPECIAL_TOKENS)
    (tmp_path / "tokenizer.json").write_text(made.to_json())
    again = TokenizerConfig(path=str(tmp_path)).build([])
    sentence = "The quick fox jumped"
    (ids,) = made.encode([sentence])
    assert again == made and again.encode([sentence]) == [ids] and len(again) <= 300
    assert made.decode(ids).strip() == (sentence.lower() if lowercase else sentence)
    assert made.decode([made.cls_token_id, *ids, made.sep_token_id, made.pad_token_id]) == made.decode(ids)
    assert made.encode(["[MASK]"]) == [[made.mask_token_id]]
    assert made.special_tokens_mask.sum() == 5 and not made.special_tokens_mask[ids].any()


def test_tokens_of_bytes_are_read_as_text() -> None:
    made = TokenizerConfig("bpe", 300).build(["un été chaud"] * 20)
    (ids,) = made.encode(["un été chaud"])
    assert [made.token_text(number) for number in ids] == [" un", " été", " chaud"]
    assert made.token_text(made.mask_token_id) == "[MASK]"
    (half, _) = made.encode(["ж"])[0][-2:]  # of a character
    assert made.token_text(half) == made.id_to_token(half)
    words = TokenizerConfig("wordpiece", 300).build(["un chaud", "una"] * 20)
    assert all(words.token_text(number) == words.id_to_token(number) for number in range(len(words)))


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_words_and_their_pieces(algorithm: str) -> None:
    made = TokenizerConfig(algorithm, 60 if algorithm != "bpe" else 300).build(TEXT)
    (ids,) = made.encode(["unbelievable foxes"])
    assert len(ids) > 2 and (~made.continuation_mask[ids]).sum() == 2 and not made.continuation_mask[ids[0]]


def test_rare_characters_are_left_out_of_a_small_alphabet() -> None:
    texts = [*TEXT, "\u03c9"]
    omega = {
        limit: TokenizerConfig(vocab_size=300, limit_alphabet=limit).build(texts).encode(["\u03c9 dog"])[0]
        for limit in (15, 100)
    }
    assert omega[15][0] == 1 and omega[100][0] != 1, "1 is [UNK]"


def test_half_a_pair_of_surrogates_is_a_question_mark() -> None:
    made = TokenizerConfig(vocab_size=200).build(TEXT)
    assert made.encode(["half \ud83d", "the fox"]) == made.encode(["half ?", "the fox"])
    assert made.encode_with_offsets("half \ud83d") == made.encode_with_offsets("half ?")


def test_padding_in_a_text_is_unknown() -> None:
    """Padding is on the right alone: what follows one in the middle of a text would be cut off."""
    made = TokenizerConfig(vocab_size=200).build(TEXT)
    ids = made.encode(["the [PAD] fox", "the fox"])[0]
    assert made.unk_token_id in ids and made.pad_token_id not in ids
    assert made.encode_with_offsets("the [PAD] fox")[0] == ids


def test_offsets_point_into_the_text() -> None:
    made = TokenizerConfig(vocab_size=200).build(TEXT)
    text = "The 🦊 fox, שלום jumps"
    _, spans = made.encode_with_offsets(text)
    assert [text[a:b].lower() for a, b in spans if text[a:b] in ("The", "fox", ",")] == ["the", "fox", ","]
    assert spans[-1][1] == len(text)


def test_a_vocabulary_of_bert(tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join([*SPECIAL_TOKENS, "the", "fox", "##es"]) + "\n")
    made = load_tokenizer(tmp_path)
    assert made.encode(["The foxes"]) == [[5, 6, 7]] and made.continuation_mask.tolist() == [False] * 7 + [True]
    file.write_text("")
    with pytest.raises(UserError, match=r"the vocabulary .*vocab\.txt is empty"):
        load_tokenizer(file)
    for lines, reason in (([*SPECIAL_TOKENS, "the", "of", "the"], "has 'the' twice"), (SPECIAL_TOKENS, "has no words")):
        file.write_text("\n".join(lines))
        with pytest.raises(UserError, match=reason):
            load_tokenizer(file)
    file.write_text("the\nfox\n")
    with pytest.raises(UserError, match=r"has no \[PAD\]"):
        load_tokenizer(file)


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has neither tokenizer\.json nor vocab\.txt"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "nothing.json")
    (tmp_path / "tokenizer.json").write_text('{"version": 1}')
    with pytest.raises(UserError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="cannot train a tokenizer"):
        TokenizerConfig().build(["", "  "])
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(UserError, match="the tokenizer has no"):
        Tokenizer(plain)
