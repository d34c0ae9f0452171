"""Classify, fill in, continue or translate texts with an exported model, without torch and without allmlp.

    allmlp export runs/reviews reviews.onnx                # on the machine that has the model
    pip install numpy onnxruntime tokenizers               # on any other
    python onnx_text.py reviews.onnx "A fine film." "Two hours too long."
    python onnx_text.py nli.onnx "A dog runs." --pair "An animal moves."
    python onnx_text.py masked.onnx "Return the [MASK] of the file."
    python onnx_text.py causal.onnx "Return the"           # with causal.step.onnx beside it
    python onnx_text.py german.encoder.onnx "A dog runs."  # with german.step.onnx beside it

The tokenizer, the preprocessing and the class names are in the metadata of the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

START_TOKENS = ("[CLS]", "<|begin_of_text|>", "<s>", "<|endoftext|>")
END_TOKENS = ("[SEP]", "<|end_of_text|>", "</s>", "<|endoftext|>")


class Exported:
    """An exported file with its metadata."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        settings = self.session.get_modelmeta().custom_metadata_map
        if "tokenizer" not in settings or "preprocessing" not in settings:
            raise SystemExit(f"{file} has no tokenizer and preprocessing: it is not a text model, or was saved without")
        self.preprocessing = json.loads(settings["preprocessing"])
        self.config, self.inputs = json.loads(settings["config"]), [value.name for value in self.session.get_inputs()]
        self.seq_len = self.session.get_inputs()[0].shape[1]
        self.tokenizer = Tokenizer.from_str(settings["tokenizer"])
        self.start, self.end = self.first_id(START_TOKENS), self.first_id(END_TOKENS)
        self.pad = self.tokenizer.token_to_id("[PAD]") or 0

    def first_id(self, tokens: tuple[str, ...]) -> int:
        return next(found for token in tokens if (found := self.tokenizer.token_to_id(token)) is not None)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def run(self, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        return self.session.run(None, {name: inputs[name] for name in self.inputs})

    def beside(self) -> Exported:
        """The decoding step: NAME.step.onnx for NAME.onnx or NAME.encoder.onnx."""
        return Exported(self.file.with_name(f"{self.file.name.split('.')[0]}.step.onnx"))

    def pad_row(self, ids: list[int], segments: list[int] | None = None) -> dict[str, np.ndarray]:
        """One row of tokens as inputs of the model."""
        width = self.seq_len - len(ids)
        mask = np.arange(self.seq_len)[None] < len(ids)
        if not self.preprocessing.get("mask_padding", True):
            mask[:] = True
        row = np.array([ids + [self.pad] * width], np.int64)
        return {
            "ids": row,
            "source": row,
            "mask": mask,
            "segments": np.array([(segments or [0] * len(ids)) + [0] * width]),
        }


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def classify(model: Exported, text: str, pair: str | None, top_k: int) -> str:
    """The most probable classes of a text, or of a pair of texts."""
    first, second = model.encode(text.strip()), model.encode(pair.strip()) if pair else []
    room = model.seq_len - (3 if second else 2)
    keep = max(min(len(first), room - room // 2), min(len(first), room - len(second)))
    begin = [model.start, *first[:keep], model.end]
    rest = [*second[: room - keep], model.end] if second else []
    (logits,) = model.run(model.pad_row(begin + rest, [0] * len(begin) + [1] * len(rest)))
    probabilities, names = softmax(logits[0]), model.preprocessing["class_names"]
    return "  ".join(f"{names[number]} {probabilities[number]:.1%}" for number in np.argsort(-probabilities)[:top_k])


def fill_masks(model: Exported, text: str, top_k: int) -> str:
    """The most probable tokens for each [MASK] of a text."""
    ids = [model.start, *model.encode(text), model.end]
    masks = [place for place, token in enumerate(ids) if token == model.tokenizer.token_to_id("[MASK]")]
    if not masks or len(ids) > model.seq_len:
        raise SystemExit(f"the text needs a [MASK], and at most {model.seq_len} tokens; it has {len(ids)}")
    (logits,) = model.run(model.pad_row(ids))
    found = []
    for row in softmax(logits[0, masks]):
        found.append("  ".join(f"{model.tokenizer.id_to_token(int(n))} {row[n]:.1%}" for n in np.argsort(-row)[:top_k]))
    return "; ".join(found)


def decode(step: Exported, prompt: list[int], fixed: dict[str, np.ndarray], count: int) -> str:
    """The most probable token, again and again, after those of the prompt, which are read one by one."""
    widths = {value.name: value.shape[2] for value in step.session.get_inputs() if value.name.startswith("past.")}
    past = {name: np.zeros((1, 0, width), np.float32) for name, width in widths.items()}
    special = {step.tokenizer.token_to_id(token) for token in ("[PAD]", "[UNK]", "[CLS]", "[MASK]")} - {None, step.end}
    ids = list(prompt)
    for position in range(len(prompt) + count - 1):
        logits, *present = step.run({"token": np.array([[ids[position]]], np.int64), **fixed, **past})
        past = dict(zip(past, present))
        if position + 1 < len(ids):
            continue
        logits[0, -1, [*special]] = -np.inf
        token = int(logits[0, -1].argmax())
        if token == step.end:
            break
        ids.append(token)
    return step.tokenizer.decode(ids[len(prompt) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a file written by `allmlp export`; for translation NAME.encoder.onnx")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--pair", help="second text of a pair to classify")
    parser.add_argument("--top-k", type=int, default=3, help="number of classes or tokens to print")
    parser.add_argument("--max-new-tokens", type=int, default=20, help="tokens to generate")
    options = parser.parse_args()

    model = Exported(options.model)
    task = model.preprocessing["task"]
    for text in options.texts:
        if task == "classes":
            print(f"{text}: {classify(model, text, options.pair, options.top_k)}")
        elif task == "translation":
            source = model.pad_row([*model.encode(text.strip())[: model.seq_len - 1], model.end])
            names = [value.name for value in model.session.get_outputs()]
            fixed = dict(zip(names, model.run(source))) | {"mask": source["mask"]}
            # The last position of a decoder is never trained, and the end of the text takes one.
            count = min(options.max_new_tokens, model.config["decoder"]["stem"]["seq_len"] - 2)
            print(f"{text}: {decode(model.beside(), [model.start], fixed, count)}".rstrip())
        elif task == "text" and options.model.with_suffix(".step.onnx").exists():
            prompt = [model.start, *model.encode(text)]
            if len(prompt) >= model.seq_len:
                raise SystemExit(f"the text has {len(prompt) - 1} tokens, the model reads {model.seq_len} in all")
            count = min(options.max_new_tokens, model.seq_len - len(prompt))
            print(f"{text}{decode(model.beside(), prompt, {}, count)}")
        elif task == "text":
            print(f"{text}: {fill_masks(model, text, options.top_k)}")
        else:
            raise SystemExit(f"{options.model}: this example does not predict {task}")


if __name__ == "__main__":
    main()
