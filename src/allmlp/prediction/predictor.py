"""Predictors: a model with its preprocessing, which decodes single inputs and predicts or embeds batches of them.

Modules that only some models need are imported on demand: imports take most of the time of `allmlp predict photo.jpg`.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from allmlp.data.decode import CorruptImage, Decode, as_tensor, crop_and_resize, decode_image
from allmlp.data.preprocessing import (
    PREPROCESSING_FILE,
    TOKENIZER_FILES,
    ImagePreprocessing,
    Preprocessing,
    SeriesPreprocessing,
    TextPreprocessing,
    read_preprocessing,
    warn_of_single_text,
)
from allmlp.data.tokenizer import Tokenizer, load_tokenizer
from allmlp.data.workers import Workers, own_cores
from allmlp.device import as_dtype, own_device, warn_of_slow_format
from allmlp.errors import UserError, command, one_line, require
from allmlp.files import read_regular
from allmlp.layers.stem import TokenEmbed
from allmlp.models.encoder import EncoderModel
from allmlp.models.model import Model, uncompiled
from allmlp.prediction.answers import Prediction, check_classes, most_probable, name_classes, name_values
from allmlp.prediction.staging import Staging, start_copies
from allmlp.tasks.task import Normalize
from allmlp.weights.bundled import model_path
from allmlp.weights.folder import CONFIG, WEIGHTS, load
from allmlp.weights.pretrained import pretrained

if TYPE_CHECKING:
    from allmlp.tasks.question_answering import PredictedAnswer

Reads = Literal["images", "texts"]
IN_MEMORY = "memory"
"""Used instead of the folder for a model without one: "the model in memory"."""
CPU_BATCH_SIZE = 32
"""By default."""
MAX_PADDING = 1024
Rows = list[list[Prediction]]
"""The answer to one input: one row, best first; a text with several [MASK] tokens has a row for each."""
Images = list[Tensor] | Tensor
"""Pixels (uint8): a list of c h w, or n c h w, which may be on the device already."""


class ImagePredictor:
    """A model that reads images, with its preprocessing.

    With `fast`, batches run through `allmlp.fast` where it supports the model.
    """

    reads: Reads = "images"

    def __init__(
        self,
        name: str,
        model: Model,
        preprocessing: ImagePreprocessing,
        dtype: torch.dtype | None = None,
        fast: bool = False,
    ) -> None:
        self.name, self.preprocessing, self.device = name, preprocessing, model.device
        size = model.spec.input_size
        if size is None:
            raise UserError(f"the input of the model is {model.spec.input_spec}, not an image")
        self.img_size = size
        color = "rgb" if len(preprocessing.mean) == 3 else "gray"
        self.decoding = Decode(crop_pct=preprocessing.crop_pct, color=color)
        self.normalize = Normalize(preprocessing.mean, preprocessing.std).to(self.device)
        self.task = preprocessing.task
        self.fast, self.dtype = fast, dtype
        self.original = model.requires_grad_(False)
        self.class_names = preprocessing.class_names
        self.staging = Staging(self.device)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Names of the outputs; their indices where they have none."""
        with torch.inference_mode():
            black = torch.zeros(self.decoding.channels, *self.img_size, dtype=torch.uint8)
            return self.name_outputs(self.original(self.collate([black]).to(self.original.dtype)))

    def name_outputs(self, outputs: Tensor) -> tuple[str, ...]:
        if self.task == "values":
            outputs = outputs.flatten(1)
        else:
            check_classes(self.name, self.original.spec, outputs, self.class_names)
        count = outputs.shape[1]
        return self.class_names if len(self.class_names) == count else tuple(map(str, range(count)))

    @cached_property
    def model(self) -> Callable[[Tensor], Tensor]:
        """The (fast) model, from normalized images to outputs."""
        return self.prepare(self.original)

    def prepare(self, model: Model) -> Callable[[Tensor], Tensor]:
        """The fast version of a model, or the model itself, for float32 inputs."""
        if self.fast:
            from allmlp.inference import fast

            try:
                return fast(model, self.dtype, batch_size=CPU_BATCH_SIZE if self.device.type == "cpu" else None)
            except UserError:  # an architecture that it does not support
                self.fast = False
        dtype = self.dtype or torch.float32
        model = model.to(dtype)
        return lambda images: model(images.to(dtype))

    def read(self, source: Any) -> Tensor:
        """Pixels (uint8, c h w), resized and cropped as for evaluation; threads may call this.

        `source` is a path, the bytes of an image file or a function that returns them, a PIL image, or uint8 pixels: a
        numpy array (h w c, or h w) or a tensor (c h w).
        """
        return read_image(self.img_size, self.decoding, source)

    decode = read

    @cached_property
    def workers(self) -> Workers:
        """Workers that read images."""
        shape = self.decoding.channels, *self.img_size
        return Workers(partial(read_image, self.img_size, self.decoding), shape, own_cores())

    @torch.inference_mode()
    def outputs(self, images: Images) -> Tensor:
        """Outputs of the model for decoded images, float32, n k."""
        return self.model(self.collate(images)).float()

    def collate(self, images: Images) -> Tensor:
        if isinstance(images, Tensor):
            return self.normalize(images.to(self.device))
        on_gpu = self.device.type == "cuda"
        return self.normalize(self.staging.stack(images) if on_gpu else torch.stack(images).to(self.device))

    def probabilities(self, images: Images) -> Tensor:
        """Class probabilities, n k."""
        outputs = self.outputs(images)
        check_classes(self.name, self.original.spec, outputs, self.class_names)
        return outputs.softmax(1)

    def predict(self, images: Images, top_k: int = 5) -> list[Rows]:
        """The `top_k` most probable classes of each image; all values for a regression."""
        return self.start_predicting(images, top_k)()

    @torch.inference_mode()
    def start_predicting(self, images: Images, top_k: int) -> Callable[[], list[Rows]]:
        """As `predict`: the computation starts on a GPU, and the function that is returned waits for the answers."""
        outputs = self.outputs(images)
        labels = self.name_outputs(outputs)
        if self.task == "values":
            values = start_copies(outputs.flatten(1))
            return lambda: [[row] for row in name_values(values()[0], labels)]
        best = start_copies(*outputs.softmax(1).topk(min(top_k, outputs.shape[1])))
        return lambda: [[row] for row in name_classes(labels, *best())]

    @cached_property
    def encoder(self) -> Callable[[Tensor], Tensor]:
        if self.fast and isinstance(self.original, EncoderModel):
            return self.prepare(without_head(self.original))
        from allmlp.tasks.probe import pooled_features

        dtype = self.dtype or torch.float32
        model = self.original.to(dtype)
        return lambda images: pooled_features(model, images.to(dtype))

    @torch.inference_mode()
    def embed(self, images: Images) -> Tensor:
        """Pooled features before the head, float32, n c."""
        features = self.encoder(self.collate(images)).float()
        return features.mean(1) if features.ndim == 3 else features


def without_head(model: EncoderModel) -> EncoderModel:
    """The model without its head, sharing weights: it returns pooled features."""
    with torch.device("meta"):
        bare = model.spec.replace(head=None).build()
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("head.")}
    bare.load_state_dict(state, assign=True)
    return bare.eval().requires_grad_(False)


def read_image(size: tuple[int, int], decoding: Decode, source: Any) -> Tensor:
    """As `ImagePredictor.read`."""
    if callable(source) and not hasattr(source, "getexif"):
        source = source()
    if isinstance(source, (str, os.PathLike)):
        try:
            source = read_regular(source)
        except OSError as reason:
            raise UserError(f"cannot read it: {reason.strerror}") from None
    if isinstance(source, bytes):
        return decode_image(source, size, decoding)
    image = source if hasattr(source, "getexif") else pil_image(source)
    try:
        return as_tensor(crop_and_resize(image, size, decoding, None))
    except OSError as reason:  # PIL decodes lazily
        raise CorruptImage(one_line(reason)) from reason


def pil_image(pixels: Any) -> Any:
    """uint8 pixels as an image."""
    if isinstance(pixels, Tensor):
        pixels = pixels.detach().cpu().movedim(0, -1).numpy() if pixels.ndim == 3 else pixels.detach().cpu().numpy()
    if not isinstance(pixels, np.ndarray):
        raise UserError(f"an image is a path, bytes, a PIL image, an array or a tensor, not {type(pixels).__name__}")
    if pixels.dtype != np.uint8:
        raise UserError(
            f"pixels must be uint8 from 0 to 255, not {pixels.dtype}; normalized images go into the model: model(x)"
        )
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim != 2 and (pixels.ndim != 3 or pixels.shape[2] not in (3, 4)):
        raise UserError(f"an array is (height, width, 3), a tensor (3, height, width), not {list(pixels.shape)}")
    return require("PIL.Image", "train").fromarray(np.ascontiguousarray(pixels))


def check_vocabulary(model: Model, tokenizer: Tokenizer, name: str) -> None:
    """Raise UserError for a tokenizer that the model cannot have been trained with.

    Embeddings of published causal models may be padded to a multiple of 64, by less than `MAX_PADDING` tokens.
    """
    size = next((part.vocab_size for part in model.spec.children() if hasattr(part, "vocab_size")), 0)
    causal = getattr(getattr(model.spec, "block", None), "causal", False)
    is_padded = causal and size % 64 == 0 and 0 < size - len(tokenizer) < MAX_PADDING
    if size != len(tokenizer) and not is_padded:
        raise UserError(f"the tokenizer in {name} has {len(tokenizer)} tokens, the model {size}: they do not match")


class TextPredictor:
    """A model that reads text, with its tokenizer."""

    reads: Reads = "texts"

    def __init__(self, name: str, model: Model, preprocessing: TextPreprocessing) -> None:
        self.name, self.preprocessing, self.device = name, preprocessing, model.device
        self.model = self.original = model.requires_grad_(False)
        self.fast, self.dtype = False, model.dtype
        self.tokenizer = load_tokenizer(Path(name))
        check_vocabulary(model, self.tokenizer, name)
        self.task = preprocessing.task
        self.class_names = preprocessing.class_names
        block = getattr(model.spec, "block", None)
        self.causal = block is not None and block.causal

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes; their indices where they have none."""
        if self.task != "classes" or self.class_names:
            return self.class_names
        return tuple(map(str, range(self.probabilities([("a", "a")]).shape[1])))

    def read(self, source: Any) -> tuple[str, str]:
        """A text and its second text, or ""; threads may call this.

        `source` is a text, a pair (the second sentence, or the paragraph with the answer to a question), or a function
        that returns either or the bytes of a text.
        """
        source = source() if callable(source) else source
        source = source.decode("utf8", "replace").strip() if isinstance(source, bytes) else source
        if not isinstance(source, (str, tuple)):
            raise UserError(f"the model in {self.name} reads text, not {type(source).__name__}")
        text, context = (source, "") if isinstance(source, str) else source
        if not text.strip():
            raise UserError("the text is empty")
        return text, context

    def decode(self, source: Any) -> tuple[str, str]:
        """Like `read`; raises UserError if the model's task is not possible for this text."""
        text, context = self.read(source)
        if self.task == "span" and not context:
            raise UserError("a question needs the paragraph that contains its answer: --context")
        if self.task == "text":
            if self.causal:
                raise UserError(f"the model in {self.name} is a causal language model: use allmlp generate")
            ids, limit = self.tokenizer.encode([text])[0], self.original.spec.stem.seq_len - 2
            if self.tokenizer.mask_token_id not in ids:
                raise UserError("the text has no [MASK] to fill in")
            if len(ids) > limit:
                raise UserError(f"the text has {len(ids)} tokens; the model reads at most {limit}")
        return text, context

    def probabilities(self, pairs: list[tuple[str, str]]) -> Tensor:
        """Class probabilities, n k."""
        from allmlp.tasks.classify_text import classify_texts

        if not all(second for _, second in pairs):
            warn_of_single_text(self.name, self.preprocessing.text_columns)
        probabilities = classify_texts(self.model, self.tokenizer, pairs, self.preprocessing.mask_padding)
        check_classes(self.name, self.original.spec, probabilities, self.class_names)
        return probabilities

    def predict(self, pairs: list[tuple[str, str]], top_k: int = 5) -> list[Rows]:
        """Tokens for every [MASK], classes, answers from the context, or a translation, by the model's task."""
        if self.task == "classes":
            return [[row] for row in most_probable(self.probabilities(pairs), self.labels, top_k)]
        if self.task == "text":
            from allmlp.tasks.masked_lm import fill_masks

            filled = fill_masks(self.model, self.tokenizer, [text for text, _ in pairs], top_k)
            return [[[Prediction(*token) for token in row] for row in rows] for rows in filled]
        if self.task == "span":
            return [
                [[Prediction(answer.text, answer.probability) for answer in answers[:top_k]]]
                for answers in self.answer(pairs)
            ]
        from allmlp.tasks.translate import translate

        translations = translate(self.model, self.tokenizer, [text for text, _ in pairs])
        return [[[Prediction(text)]] for text in translations]

    def answer(self, questions: list[tuple[str, str]]) -> list[list[PredictedAnswer]]:
        """The answers to each question about its context, the most probable first."""
        from allmlp.tasks.question_answering import QuestionAnswering, answer_question

        spec = QuestionAnswering(mask_padding=self.preprocessing.mask_padding)
        return [answer_question(self.model, self.tokenizer, *pair, spec) for pair in questions]

    def collate(self, pairs: list[tuple[str, str]]) -> dict[str, Any]:
        """The arguments of an encoder: ids `x`, `mask`, and `segments` if it distinguishes them; n s. The mask is None
        if the model reads padding.
        """
        model = self.original
        if not isinstance(model, EncoderModel):
            raise UserError(f"the model in {self.name} is an encoder-decoder: embed and transform need an encoder")
        from allmlp.tasks.classify_text import encode_pairs

        masked = self.preprocessing.mask_padding
        ids, segments = encode_pairs(model, self.tokenizer, pairs, masked)
        stem = model.spec.stem
        has_segments = isinstance(stem, TokenEmbed) and (stem.segments or 0) > 1
        mask = ~self.tokenizer.padding(ids) if masked else None
        return {"x": ids, "mask": mask} | ({"segments": segments} if has_segments else {})

    @torch.inference_mode()
    def embed(self, pairs: list[tuple[str, str]]) -> Tensor:
        """Pooled features before the head, or the mean over the tokens where the model has no pool; float32, n c."""
        batch, model = self.collate(pairs), self.original
        assert isinstance(model, EncoderModel)
        features, mask = model.forward_features(**batch), batch["mask"]
        if model.pool is not None:
            return model.pool(features, mask).float()
        mask = ~self.tokenizer.padding(batch["x"])
        weight = mask[:, :, None].to(features.dtype)
        return ((features * weight).sum(1) / weight.sum(1)).float()


Predictor = ImagePredictor | TextPredictor


class ModelInputs(NamedTuple):
    """What a model reads."""

    reads: Reads
    questions: bool = False
    """Whether the texts are questions, which need a context."""
    whole_files: bool = False
    """Whether a text file is one text."""
    trained_on: tuple[str, ...] = ()
    """The columns of images or texts in training."""


def inputs_of(preprocessing: Preprocessing | None) -> ModelInputs:
    if isinstance(preprocessing, TextPreprocessing):
        is_question = preprocessing.task == "span"
        return ModelInputs("texts", is_question, preprocessing.whole_files, preprocessing.text_columns)
    column = preprocessing.image_column if isinstance(preprocessing, ImagePreprocessing) else ""
    return ModelInputs("images", trained_on=(column,) if column else ())


def model_inputs(model: str | os.PathLike[str]) -> ModelInputs:
    """What a model reads, without loading it."""
    folder = model_folder(os.fspath(model))
    return inputs_of(None if folder is None else read_preprocessing(folder))


def model_folder(name: str) -> Path | None:
    """The folder of a model; None for one that is loaded by name."""
    folder = model_path(name)
    return folder if folder.is_dir() else None


def model_checksum(name: str) -> str:
    """Checksum of everything in a model folder that its answers depend on; the name of a model that is not a folder."""
    folder = model_folder(name)
    if folder is None:
        return name
    checksum = hashlib.sha256()
    for file in (CONFIG, WEIGHTS, PREPROCESSING_FILE, *TOKENIZER_FILES):
        if (folder / file).is_file():
            with open(folder / file, "rb") as source:
                checksum.update(hashlib.file_digest(source, "sha256").digest())
    return checksum.hexdigest()


def open_predictor(
    model: str | os.PathLike[str] | Model,
    *,
    device: str | None = None,
    dtype: torch.dtype | str | None = None,
    fast: bool = False,
) -> Predictor:
    """Open a model by its folder or name, as in `allmlp.from_pretrained`, or one that is loaded.

    `device` is "cpu", "cuda", or None for a GPU if there is one. The default `dtype` is float32, and bfloat16 for a
    fast model on a GPU. Device and dtype of a loaded model are its own by default.
    """
    dtype = None if dtype is None else as_dtype(dtype)
    model = uncompiled(model)
    if isinstance(model, Model):
        return loaded_predictor(model, device, dtype, fast)
    if not isinstance(model, str | os.PathLike):
        raise UserError(f"name a model, its folder, or a model of this library, not a {type(model).__name__}")
    name, place = os.fspath(model), own_device(device)
    warn_of_slow_format(place, dtype)
    folder = model_folder(name)
    if folder is None:
        loaded = pretrained(name, device=place)
        return ImagePredictor(name, loaded.model, loaded.preprocessing, dtype, fast)
    preprocessing = read_preprocessing(folder)
    if isinstance(preprocessing, ImagePreprocessing):
        return ImagePredictor(str(folder), load(folder, device=place), preprocessing, dtype, fast)
    if isinstance(preprocessing, SeriesPreprocessing):
        raise UserError(f"{folder} forecasts time series: name a table, {command('predict', folder, 'TABLE.csv')}")
    return TextPredictor(str(folder), load(folder, device=place, dtype=dtype or torch.float32), preprocessing)


def loaded_predictor(model: Model, device: str | None, dtype: torch.dtype | None, fast: bool) -> Predictor:
    """A predictor with the weights of `model`, which is not modified."""
    preprocessing, view = model.preprocessing, frozen_view(model)
    if device is not None:
        view = view.to(own_device(device))
    warn_of_slow_format(view.device, dtype)
    if isinstance(preprocessing, ImagePreprocessing):
        default = None if fast and model.dtype == torch.float32 else model.dtype
        return ImagePredictor(model.folder or IN_MEMORY, view, preprocessing, dtype or default, fast)
    if preprocessing is None:
        kind = "ImagePreprocessing(mean, std)" if model.spec.input_size else "TextPreprocessing(task, seq_len)"
        raise UserError(
            "the model does not know how its inputs are prepared: load one with allmlp.load, or set "
            f"model.preprocessing = {kind} of allmlp.data.preprocessing"
        )
    if model.folder is None:
        raise UserError("the model has no tokenizer: set model.folder to a folder with a tokenizer.json or vocab.txt")
    return TextPredictor(model.folder, view.to(dtype or model.dtype), preprocessing)


def frozen_view(model: Model) -> Model:
    """The same weights in modules of their own, in evaluation mode and without gradients.

    Casting or moving the view, or changing its mode, does not change `model`.
    """
    shared: dict[int, Any] = {id(weight): nn.Parameter(weight.detach(), False) for weight in model.parameters()}
    shared |= {id(buffer): buffer.detach() for buffer in model.buffers()}
    return copy.deepcopy(model, shared).eval()


def generate(
    folder: Path,
    prompt: str = "",
    max_new_tokens: int = 50,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    device: str | None = "cpu",
    dtype: torch.dtype | str | None = None,
) -> Iterator[str]:
    """Yield the prompt and the text generated after it by the causal language model in `folder`, word by word.

    >>> text = "".join(generate(folder, "Once"))
    """
    predictor = open_predictor(folder, device=device, dtype=dtype)
    if not isinstance(predictor, TextPredictor):
        raise UserError(f"the model in {folder} reads images, not text")
    if predictor.task != "text" or not predictor.causal:
        raise UserError(f"the model in {folder} is not a causal language model: it cannot generate text")
    from allmlp.tasks import causal_lm

    model, tokenizer = predictor.original, predictor.tokenizer
    start = tokenizer.encode([prompt])[0] if prompt else []
    tokens = causal_lm.generate(model, tokenizer, prompt, max_new_tokens, temperature, top_k, top_p, seed)
    return causal_lm.stream_text(tokenizer, itertools.chain(start, tokens))
