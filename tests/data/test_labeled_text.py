"""Labeled texts from tables."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import lzma
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from allmlp.data.labeled_text import LabeledText, LabeledTextReader, join_pair, label_order
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.errors import UserError
from allmlp.spec import from_json

pytest.importorskip("tokenizers")
SST2 = "sentence\tlabel\nvery good\t1\nvery bad\t0\n\nan emoji 🐑\t1\n"
MNLI = """index\tsentence1\tsentence2\tgold_label
0\tit rains\tit is wet\tentailment
1\tit rains\tit is dry\tcontradiction
2\ta\tb\t-
"""


def opened(folder: Path, train: str, *tests: str, **changes: Any) -> Any:
    (folder / "train.tsv").write_text(train)
    for number, test in enumerate(tests):
        (folder / f"dev{number}.tsv").write_text(test)
    names = ",".join(str(folder / f"dev{number}.tsv") for number in range(len(tests)))
    spec = LabeledText(
        str(folder / "train.tsv"), names, tokenizer=TokenizerConfig(vocab_size=100), seq_len=12, cache=str(folder)
    )
    return spec.replace(**changes).load()


def test_one_sentence(tmp_path: Path) -> None:
    data = opened(tmp_path, SST2, SST2)
    ids, segments, labels, test_set = data.train.fetch(torch.arange(3))
    assert data.class_names == ("0", "1") and labels.tolist() == [1, 0, 1] and test_set.tolist() == [0] * 3
    assert data.tokenizer.decode(ids[0].tolist()) == "very good" and not segments.any()
    assert ids[0, 0] == data.tokenizer.cls_token_id and (ids[0] == data.tokenizer.sep_token_id).sum() == 1


def test_pairs_and_several_test_files(tmp_path: Path) -> None:
    data = opened(tmp_path, MNLI, MNLI, MNLI)
    ids, segments, labels, test_set = data.test.fetch(torch.arange(4))
    assert data.class_names == ("contradiction", "entailment") and labels.tolist() == [1, 0, 1, 0]
    assert test_set.tolist() == [0, 0, 1, 1] and data.test_names == ("dev0", "dev1")
    second = ids[0][segments[0].bool()]
    assert data.tokenizer.decode(second.tolist()) == "it is wet" and second[-1] == data.tokenizer.sep_token_id
    known = from_json(data.files()["preprocessing.json"])
    assert known.text_columns == ("sentence1", "sentence2")  # type: ignore[attr-defined]
    assert known.label_column == "gold_label"  # type: ignore[attr-defined]


def test_validation_file(tmp_path: Path) -> None:
    (tmp_path / "val.tsv").write_text(SST2.replace("very good", "quite good"))
    data = opened(tmp_path, SST2, SST2, val=str(tmp_path / "val.tsv"))
    assert data.tokenizer.decode(data.validation.examples.ids[0].tolist()).endswith("good")
    assert len(data.validation) == len(data.test) == 3 and data.checksum() != opened(tmp_path, SST2, SST2).checksum()
    assert data.split_validation(1).validation is None
    (tmp_path / "val.tsv").write_text("sentence\tlabel\nx\tbest\n")
    with pytest.raises(UserError, match=r"val\.tsv: unknown label 'best'"):
        opened(tmp_path, SST2, SST2, val=str(tmp_path / "val.tsv"))


def chained(groups: int) -> str:
    """Pairs (a, b), (b, c): three texts that must stay together, in each group."""
    names = [f"text{number}" for number in range(groups)]
    rows = [
        f"{a}\t{b}\t{number % 2}" for number, n in enumerate(names) for a, b in ((f"{n} a", f"{n} B"), (f"{n} b", n))
    ]
    return "sentence1\tsentence2\tlabel\n" + "\n".join(rows)


def texts(data: Any, split: Any) -> set[str]:
    ids, segments, *_ = split.examples
    parts = [row[segment.bool() == second] for row, segment in zip(ids, segments) for second in (False, True)]
    return {data.tokenizer.decode(part.tolist()).lower() for part in parts}


def test_splits_have_no_text_in_common(tmp_path: Path) -> None:
    """By a hash without a test file, and where examples are held out; the largest group may be too large for that."""
    data = opened(tmp_path, chained(60), test_fraction=0.3, val_fraction=0.2, test="")
    splits = (data.train, data.validation, data.test)
    assert [len(split) for split in splits] == [60, 24, 36]
    assert all(split.examples.labels.float().mean() == 0.5 for split in splits)
    for one, other in itertools.combinations(splits, 2):
        assert not texts(data, one) & texts(data, other)
    again = opened(tmp_path, chained(60), test_fraction=0.3, val_fraction=0.2, test="")
    other = opened(tmp_path, chained(60), test_fraction=0.3, val_fraction=0.2, test="", split_seed=1)
    assert again.checksum() == data.checksum() != other.checksum()
    held = data.split_validation(21)
    assert len(held.test) == 20 and len(held.train) == len(data.train) - 20
    assert not texts(held, held.train) & texts(held, held.test)
    with pytest.raises(UserError, match="cannot hold out 1 of"):
        data.split_validation(1)


def test_equal_texts_stay_together_and_are_told(tmp_path: Path) -> None:
    rows = [f"{'Same  text' if number % 3 else 'same text'} {number // 2}\t{number % 4 // 2}" for number in range(80)]
    data = opened(tmp_path, "text\tlabel\n" + "\n".join(rows) + "\nsame text 0\t1\n", test="")
    assert len(data.train) + len(data.validation) + len(data.test) == 81
    assert texts(data, data.train) & (texts(data, data.test) | texts(data, data.validation)) == {""}
    assert data.notes == (
        "1 text has different labels in different rows",
        "split with seed 0: 57 train, 12 validation, 12 test",
    )
    given = opened(tmp_path, SST2, SST2.replace("very bad", "quite bad"))
    assert given.notes == ("2 of 3 test texts are also training texts",) and given.validation is None
    assert len(opened(tmp_path, SST2, SST2, val_fraction=0.3).validation) == 1


def test_text_files_in_folders_of_classes(tmp_path: Path) -> None:
    for split, label, count in itertools.product(("train", "test"), ("neg", "pos", "unsup"), range(4)):
        file = tmp_path / split / label / f"{count}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{label} {count % 3}\n\n{'seen' if count == 1 else split}\n" if count else "\n")
    (tmp_path / "train" / "urls_pos.txt").write_text("http\n")
    spec = LabeledText(str(tmp_path), tokenizer=TokenizerConfig(vocab_size=100), seq_len=12, cache=str(tmp_path / "c"))
    data = spec.load()
    assert data.class_names == ("neg", "pos") and len(data.train) == len(data.test) == 6 and data.validation is None
    assert texts(data, data.train) == {
        "",
        *(f"{label} {rest}" for label in data.class_names for rest in ("1 seen", "2 train", "0 train")),
    }
    assert data.train.examples.labels.bincount().tolist() == [3, 3]
    known = from_json(data.files()["preprocessing.json"])
    assert known.whole_files and not known.text_columns  # type: ignore[attr-defined]
    every, strays, skipped, shared = data.notes
    assert every.startswith("every folder of text files is a class, every file a text: neg, pos; for a language model")
    assert strays.startswith("9 text files are outside of class folders and not used: test/unsup/0.txt, ")
    assert skipped == "skipped 4 files without a text" and shared == "2 of 6 test texts are also training texts"
    parts = spec.replace(path=str(tmp_path / "train"), test=str(tmp_path / "test")).load()
    assert parts.checksum() == data.checksum() and parts.test_names == ("test",)
    assert len(spec.replace(val_fraction=0.34).load().validation) == 2
    (tmp_path / "train" / "pos" / "1.txt").write_bytes(b"caf\xe9")
    assert spec.load().notes[2] == "1 file is not UTF-8, so that letters are missing: train/pos/1.txt"
    (tmp_path / "test" / "new").mkdir()
    (tmp_path / "test" / "new" / "1.txt").write_text("x")
    with pytest.raises(UserError, match="unknown label 'new'"):
        spec.load()


def test_a_column_of_splits_beside_a_file_for_validation(tmp_path: Path) -> None:
    """What the column calls test is neither trained on nor replaced."""
    rows = [f"text {number},{number % 2},{['train', 'dev', 'test'][number % 3]}" for number in range(30)]
    (tmp_path / "val.csv").write_text("text,label\nother 1,0\nother 2,1\n")
    for chosen in (rows, [row for row in rows if "test" not in row]):
        data = csv_data(tmp_path, "text,label,split\n" + "\n".join(chosen), val=str(tmp_path / "val.csv"))
        assert [len(split) for split in (data.train, data.validation, data.test)] == [10, 2, 10]
        assert data.notes == ()


def test_a_column_of_splits(tmp_path: Path) -> None:
    rows = [f"text {number},{number % 2},{['TRAIN', 'TRAIN', 'dev', 'test'][number // 2 % 4]}" for number in range(40)]
    data = csv_data(tmp_path, "text,label,split\n" + "\n".join(rows))
    assert [len(split) for split in (data.train, data.validation, data.test)] == [20, 10, 10] and data.notes == ()
    data = csv_data(tmp_path, "text,label,split\n" + "\n".join(rows).replace("test", "train"))
    assert len(data.train) == 30 and len(data.test) == 10 and data.validation is None and data.notes == ()
    data = csv_data(tmp_path, "text,label,split\n" + "\n".join(rows).replace("test", "train").replace("dev", "train"))
    assert len(data.train) == 28 and data.notes[-1] == "split with seed 0: 28 train, 6 validation, 6 test"
    data = csv_data(tmp_path, "text,label,split\n" + "\n".join(rows).replace("TRAIN", ""))
    assert [len(split) for split in (data.train, data.validation, data.test)] == [20, 10, 10]
    with pytest.raises(UserError, match="the column 'split' has 'holdout', which names no split"):
        csv_data(tmp_path, "text,label,split\n" + "\n".join(rows).replace("test", "holdout"))
    data = csv_data(tmp_path, "text,label,set\n" + "\n".join(rows).replace("test", "bus").replace("dev", "car"))
    assert len(data.train) == 28


def test_labels_beside_dates_and_missing_ones(tmp_path: Path) -> None:
    labels = ("1", "2", "nan", "NaN", "-", "")
    rows = [f"2024-01-{n % 9 + 1:02},text number {n},{labels[n % 6]}" for n in range(60)]
    data = csv_data(tmp_path, "written,review,stars\n" + "\n".join(rows))
    assert data.class_names == ("1", "2") and "skipped 40 rows without a label" in data.notes
    data = csv_data(tmp_path, "written,review\n" + "\n".join(row.rpartition(",")[0] for row in rows))
    assert data.class_names == tuple(f"2024-01-{n + 1:02}" for n in range(9))


def test_a_note_on_classes_with_almost_the_same_name(tmp_path: Path) -> None:
    rows = [f"text number {n},{('good', 'Good', 'very bad', 'bad')[n % 4]}" for n in range(40)]
    data = csv_data(tmp_path, "text,label\n" + "\n".join(rows))
    assert "classes with almost the same name: 'Good' and 'good'" in data.notes and len(data.class_names) == 4


def csv_data(folder: Path, content: str, name: str = "train.csv", **changes: Any) -> Any:
    (folder / name).write_text(content)
    tokenizer = TokenizerConfig(vocab_size=100)
    return LabeledText(str(folder / name), tokenizer=tokenizer, seq_len=12, cache=str(folder), **changes).load()


def quoted(*rows: Sequence[str]) -> str:
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows(rows)
    return buffer.getvalue()


REVIEWS = [(f"what a film, number {n}", ("good", "bad", "so-so")[n % 3], str(n)) for n in range(30)]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a.parquet"])
def test_every_format_gives_the_same(name: str, tmp_path: Path) -> None:
    """Under other column names, found by their content, and with a column of numbers."""
    columns = ("words", "kind", "index")
    records = [dict(zip(columns, row)) for row in REVIEWS]
    if name == "a.parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(records), tmp_path / name)
    elif name == "a.jsonl":
        (tmp_path / name).write_text("\n".join(map(json.dumps, records)))
    elif name == "a.json":
        (tmp_path / name).write_text(json.dumps(records))
    else:
        text = quoted(columns, *REVIEWS)
        (tmp_path / name).write_text(
            text.replace('"', "").replace(", n", " n").replace(",", "\t") if name == "a.tsv" else text
        )
    tokenizer = TokenizerConfig(vocab_size=100)
    data = LabeledText(str(tmp_path / name), tokenizer=tokenizer, seq_len=12, cache=str(tmp_path)).load()
    assert data.class_names == ("bad", "good", "so-so")
    assert [len(split) for split in (data.train, data.validation, data.test)] == [21, 4, 5]
    assert data.notes[0] == (
        "columns found by their content: label_column=kind, text_column=words (set data.label_column to change this)"
    )


def test_columns_by_content(tmp_path: Path) -> None:
    """Pairs, and a table without a header; a long text is truncated, a text without spaces is found by its script."""
    pairs = [(str(n), f"it rains in {n}", f"it is {n} wet", ("yes", "no")[n % 2]) for n in range(20)]
    data = csv_data(tmp_path, quoted(("id", "left", "right", "answer"), *pairs))
    assert data.class_names == ("no", "yes") and data.train.examples.segments.any(1).all()
    assert "label_column=answer, text_column=left, text_pair_column=right" in data.notes[0]
    plain = [(f"{n} " * (5000 if n % 2 else 2), str(n % 2)) for n in range(20)]
    data = csv_data(tmp_path, quoted(*plain))
    assert data.class_names == ("0", "1") and len(data.train) + len(data.validation) + len(data.test) == 20
    assert "text_column=column_1" in data.notes[0] and data.notes[-1].endswith(
        "fill all 12 tokens; longer ones are cut"
    )
    chinese = [(f"这部电影很好{n}" * 3, f"id{n}", ("好", "坏")[n % 2]) for n in range(20)]
    data = csv_data(tmp_path, quoted(("甲", "乙", "丙"), *chinese))
    assert data.class_names == ("坏", "好") and "text_column=甲" in data.notes[0]


def test_columns_of_text_that_are_not_read_are_named(tmp_path: Path) -> None:
    """Of titles and bodies the bodies were read, without a word."""
    rows = [(f"a title {n}", f"what a long film, number {n}", ("good", "bad")[n % 2]) for n in range(20)]
    content = quoted(("title", "body", "label"), *rows)
    note = "texts are read from body, not from title (set data.text_column or data.text_pair_column to change this)"
    assert note in csv_data(tmp_path, content).notes
    for chosen in ({"text_column": "title"}, {"text_column": "title", "text_pair_column": "body"}):
        assert not any("are read from" in one for one in csv_data(tmp_path, content, **chosen).notes)


def test_labels_of_every_kind(tmp_path: Path) -> None:
    """Dates are in order, many small classes are divided, and a class of one example is for training."""
    days = [(f"text {n}", f"2024-{n % 3 + 1:02}-15") for n in range(30)]
    assert csv_data(tmp_path, quoted(("text", "date"), *days)).class_names == ("2024-01-15", "2024-02-15", "2024-03-15")
    many = [(f"text {n}", f"class {n % 100}") for n in range(300)] + [("a single one", "rare"), ("", "rare"), ("x", "")]
    data = csv_data(tmp_path, quoted(("text", "label"), *many))
    assert [len(split) for split in (data.train, data.validation, data.test)] == [211, 45, 45]
    assert data.train.examples.labels.bincount().tolist().count(0) == 0
    assert data.train.examples.labels[:-1].bincount(minlength=101)[:100].min() >= 1
    assert data.notes[:3] == (
        "skipped 1 row without a text",
        "skipped 1 row without a label",
        "1 class has one example: rare",
    )


def test_unlabeled_texts_are_never_held_out(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("\n".join(f"more {number}" for number in range(50)))
    held = opened(tmp_path, SST2, SST2, unlabeled=str(tmp_path / "more.txt")).split_validation(2)
    assert (held.test.examples.labels >= 0).all() and len(held.test) == 2 and len(held.train) == 51


PARSES = "sentence1_binary_parse|sentence2_binary_parse|sentence1_parse|sentence2_parse|sentence1|sentence2"
STSB = "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2|score"


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        ("sentence|label", ("sentence", "", "label")),  # SST-2
        ("Quality|#1 ID|#2 ID|#1 String|#2 String", ("#1 String", "#2 String", "Quality")),  # MRPC
        ("id|qid1|qid2|question1|question2|is_duplicate", ("question1", "question2", "is_duplicate")),  # QQP
        (f"index|promptID|pairID|genre|{PARSES}|label1|gold_label", ("sentence1", "sentence2", "gold_label")),  # MNLI
        ("index|question|sentence|label", ("question", "sentence", "label")),  # QNLI
        ("index|sentence1|sentence2|label", ("sentence1", "sentence2", "label")),  # RTE, WNLI
        ("pair_ID|sentence_A|sentence_B|entailment_label", ("sentence_A", "sentence_B", "entailment_label")),  # SICK
        ("source|label|mark|sentence", ("column_4", "", "column_2")),  # CoLA, whose files have no header
        (STSB, "genre, year all could be the label"),  # scores
    ],
)
def test_official_files_of_glue(header: str, columns: tuple[str, ...] | str, tmp_path: Path) -> None:
    """Read by the names of their columns, or refused; never as something else."""
    names, rows = header.split("|"), []
    for number in range(60):
        text = f"Sentence {number} of those in this file."
        kinds = {"score": f"{number / 12}", "source": "gj04", "filename": "x", "mark": ""}
        kinds |= dict.fromkeys(
            ("label", "gold_label", "label1", "entailment_label", "is_duplicate", "Quality"), "01"[number % 2]
        )
        kinds |= {"genre": ("fiction", "travel")[number % 2], "year": ("2012", "2013")[number % 3 // 2]}
        numbers = [name for name in names if "id" in name.lower() or "index" in name]
        rows.append([kinds.get(name, str(number) if name in numbers else f"{name} {text}") for name in names])
    head = [] if "column_4" in columns else [names]
    (tmp_path / "train.tsv").write_text("".join("\t".join(row) + "\n" for row in head + rows), encoding="utf8")
    reader = LabeledTextReader(LabeledText(str(tmp_path / "train.tsv")))
    if isinstance(columns, str):
        with pytest.raises(UserError, match=columns):
            reader.read(reader.spec.path)
    else:
        assert len(reader.read(reader.spec.path)) == 60 and reader.columns[:3] == columns


def test_other_columns_and_packed_files(tmp_path: Path) -> None:
    text = "review\tstars\nfine\t5\npoor\t1\n"
    (tmp_path / "t.tsv.xz").write_bytes(lzma.compress(text.encode()))
    data = opened(tmp_path, text, text, text_column="review", label_column="stars", path=str(tmp_path / "t.tsv.xz"))
    assert data.class_names == ("1", "5") and len(data.train) == 2


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("way", ["cut off", "another format"])
def test_packed_files_that_are_damaged(suffix: str, way: str, tmp_path: Path) -> None:
    if suffix == ".zst":
        pytest.importorskip("zstandard")
        if way == "cut off":
            pytest.skip("zstandard's reader does not tell")
    pack = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": bytes}[suffix]
    file = tmp_path / f"t.tsv{suffix}"
    file.write_bytes(pack(SST2.encode() * 50)[:-20] if way == "cut off" else SST2.encode())
    with pytest.raises(UserError, match=f"cannot read {re.escape(str(file))}"):
        opened(tmp_path, SST2, SST2, path=str(file))


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    data = opened(tmp_path, "\ufeff" + SST2, SST2)
    assert len(data.train) == 3 and data.class_names == ("0", "1")


def test_the_order_of_classes_is_always_the_same() -> None:
    names = ["nan", "10", "2", "word", "NaN", "-1"]
    for order in itertools.permutations(names):
        assert sorted(order, key=label_order) == ["-1", "2", "10", "NaN", "nan", "word"]


def test_the_longer_text_is_truncated() -> None:
    tokenizer = TokenizerConfig(vocab_size=60).build(["a b c d"])

    def sizes(a: int, b: int, length: int) -> tuple[int, int]:
        ids, start = join_pair([9] * a, [10] * b, tokenizer, length)
        assert len(ids) <= length and 10 not in ids[:start] and 9 not in ids[start:]
        return ids.count(9), ids.count(10)

    assert sizes(3, 3, 12) == (3, 3) and sizes(20, 0, 12) == (10, 0)
    assert sizes(20, 2, 12) == (7, 2) and sizes(2, 20, 12) == (2, 7) and sizes(20, 20, 12) == (5, 4)
    with pytest.raises(UserError, match="no room for text"):
        join_pair([9], [], tokenizer, 2)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (SST2, SST2.replace("bad\t0", "bad\tmaybe"), "unknown label 'maybe', which no training text has"),
        (SST2.replace("\t0", "\t1"), SST2, "has only one class, '1'"),
        (SST2.replace("very bad", ""), SST2, r"has only one class, '1' \(skipped 1 row without a text\): at least"),
        ("sentence\tlabel\n", SST2, "has no labeled texts"),
        ("a\tb\tlabel\n1\t2\tx\n1\t3\ty\n", SST2, "none of a, b, label is known as the text: set data.text_column"),
        ("a\tb\tc\tlabel\nx 1\tx 2\tx 3\tx\ny 1\ty 2\ty 3\ty\n", SST2, "a, b, c all could be the text: set"),
        ("sentence\tlabel\nonly text\n", SST2, r"line 2: 1 columns instead of 2"),
        ("sentence\tsense\nx\t1\n", SST2, "none of sentence, sense is known or could be the label: set data.label_c"),
        ("sentence\ta\tb\n" + "x\t1\t2\ny\t2\t1\n" * 3, SST2, "a, b all could be the label: set data.label_column"),
        (
            "sentence\tlabel\n" + "".join(f"x\t0.{n}1\n" for n in range(30)),
            SST2,
            r"not classes \(scores cannot be learned",
        ),
    ],
)
def test_errors_name_the_problem(tmp_path: Path, train: str, test: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(tmp_path, train, test)


def test_a_named_column_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no column 'sentnce'; did you mean 'sentence'"):
        opened(tmp_path, SST2, SST2, text_column="sentnce")
    with pytest.raises(UserError, match=r"train\.tsv has no column 'x', only sentence, label"):
        opened(tmp_path, SST2, SST2, label_column="x")


def test_the_same_tokenizer_for_every_process(tmp_path: Path) -> None:
    assert opened(tmp_path, SST2, SST2).tokenizer == opened(tmp_path, SST2, SST2).tokenizer
    assert len(list((tmp_path / "tokenizers").glob("*.json"))) == 1


def test_unlabeled_texts(tmp_path: Path) -> None:
    file = tmp_path / "more.txt"
    file.write_text("not bad\n\na story\n")
    data = opened(tmp_path, SST2, SST2, unlabeled=str(file))
    ids, segments, labels, _ = data.train.fetch(torch.arange(5))
    assert len(data.train) == 5 and data.unlabeled == 2 and data.class_names == ("0", "1")
    assert labels.tolist() == [1, 0, 1, -1, -1] and (data.test.fetch(torch.arange(3)).labels >= 0).all()
    assert not segments.any() and (ids[3] == data.tokenizer.sep_token_id).sum() == 1
    file.write_text("it snows\tit is cold\n")
    data = opened(tmp_path, MNLI, MNLI, unlabeled=str(file))
    assert data.train.fetch(torch.tensor([2])).segments.any() and data.unlabeled == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SST2, r"more\.txt, line 1: 2 columns instead of 1: unlabeled files have neither a header"),
        ("\n\n", r"more\.txt has no texts"),
    ],
)
def test_invalid_unlabeled_files(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        opened(tmp_path, SST2, SST2, unlabeled=str(tmp_path / "more.txt"))
    with pytest.raises(UserError, match="no text files at"):
        opened(tmp_path, SST2, SST2, unlabeled=str(tmp_path / "none.txt"))
