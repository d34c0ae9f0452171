"""The configuration of this library's models in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from allmlp.data.preprocessing import PREPROCESSING_FILE, ImagePreprocessing, TextPreprocessing
from allmlp.errors import UserError
from allmlp.hf.code import MODELING_FILE, export_code
from allmlp.layers.head import ClassifierHead, PooledHead, QAHead
from allmlp.layers.stem import TokenEmbed
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.spec import from_dict, to_json

AUTO_CLASSES = {
    "AutoConfig": "AllMlpConfig",
    "AutoModel": "AllMlpModel",
    "AutoModelForImageClassification": "AllMlpForImageClassification",
    "AutoModelForMaskedLM": "AllMlpForMaskedLM",
    "AutoModelForCausalLM": "AllMlpForCausalLM",
    "AutoModelForSequenceClassification": "AllMlpForSequenceClassification",
    "AutoModelForQuestionAnswering": "AllMlpForQuestionAnswering",
    "AutoModelForSeq2SeqLM": "AllMlpForSeq2SeqLM",
    "AutoImageProcessor": "AllMlpImageProcessor",
}
"""Auto classes of transformers -> ours."""
READ_PADDING = ("classes", "span")
"""Tasks of text models that may have been trained to read padding."""


class AllMlpConfig(PreTrainedConfig):
    """The spec of a model as JSON, the names of its classes, and the normalization of its images.

    If the number of labels differs from the spec's, the model gets a new head.
    """

    model_type = "allmlp"
    spec: dict[str, Any] | None = None
    image_mean: list[float] | None = None
    image_std: list[float] | None = None
    crop_pct: float | None = None
    tokenizer_class: str | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    decoder_start_token_id: int | None = None
    mask_padding: bool = True
    """False for a classifier, or a model that answers questions, which was trained to read padding: see
    `TextPreprocessing`."""
    whole_files: bool = False
    """Whether a text file is one text, as in training: see `TextPreprocessing`."""
    text_columns: list[str] | tuple[str, ...] = ()
    image_column: str = ""
    label_column: str = ""
    """The columns of the table in training."""

    def __post_init__(self, **kwargs: Any) -> None:
        if self.spec is not None:
            spec = self.model_spec()
            self.is_encoder_decoder = isinstance(spec, EncoderDecoder)
            head = getattr(spec, "head", None)
            if self.id2label is None and isinstance(head, (ClassifierHead, PooledHead)):
                kwargs.setdefault("num_labels", head.num_classes)
        if self.id2label is not None and kwargs.get("num_labels", self.num_labels) != self.num_labels:
            self.id2label = self.label2id = None  # from_pretrained(..., num_labels=5): other labels, without names
        super().__post_init__(**kwargs)

    def model_spec(self) -> Encoder | EncoderDecoder:
        """The spec that the configuration describes."""
        if not isinstance(self.spec, dict):
            raise UserError("the configuration has no 'spec': it was not saved by allmlp")
        spec = from_dict(self.spec, "spec")
        if not isinstance(spec, (Encoder, EncoderDecoder)):
            raise UserError(f"the 'spec' of the configuration is {type(spec).__name__}, which is not a model of allmlp")
        return spec

    @property
    def encoder(self) -> Encoder:
        spec = self.model_spec()
        return spec if isinstance(spec, Encoder) else spec.encoder

    @property
    def hidden_size(self) -> int:
        return self.encoder.num_features

    @property
    def num_hidden_layers(self) -> int:
        return self.encoder.num_blocks

    @property
    def vocab_size(self) -> int | None:
        return getattr(self.encoder.stem, "vocab_size", None)

    @property
    def max_position_embeddings(self) -> int:
        return self.encoder.stem.tokens

    def preprocessing(self) -> ImagePreprocessing | TextPreprocessing | None:
        """Preprocessing for `allmlp`; None if the normalization of images is unknown, or if an example may have several
        classes, or a text values, which `allmlp` does not predict.
        """
        reads_text, has_values = isinstance(self.encoder.stem, TokenEmbed), self.problem_type == "regression"
        if self.problem_type == "multi_label_classification" or (reads_text and has_values):
            return None
        spec, labels = self.model_spec(), [str(label) for _, label in sorted((self.id2label or {}).items())]
        head = getattr(spec, "head", None)
        classifies = isinstance(head, (ClassifierHead, PooledHead))
        named = classifies and labels != [f"LABEL_{number}" for number in range(len(labels))]
        class_names = tuple(labels) if named else ()
        if reads_text:
            span, translation = isinstance(head, QAHead), isinstance(spec, EncoderDecoder)
            task = "classes" if classifies else "span" if span else "translation" if translation else "text"
            masked = self.mask_padding or task not in READ_PADDING
            preprocessing = TextPreprocessing(task, self.encoder.stem.tokens, class_names, masked)
            columns = {"text_columns": tuple(self.text_columns), "label_column": self.label_column}
            return preprocessing.replace(whole_files=self.whole_files, **columns)
        if self.image_mean is None or self.image_std is None:
            return None
        task = "values" if has_values else "classes"
        columns = self.image_column, self.label_column
        statistics = tuple(self.image_mean), tuple(self.image_std)
        return ImagePreprocessing(*statistics, class_names, self.crop_pct or 1, task, *columns)

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **options: Any) -> None:
        """Also write the modeling file, for use without allmlp, and preprocessing.json, for use with it."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MODELING_FILE).write_text(export_code(), encoding="utf8")
        preprocessing, file = self.preprocessing(), folder / PREPROCESSING_FILE
        if preprocessing is None:
            file.unlink(missing_ok=True)  # of another model that was saved there
        else:
            file.write_text(to_json(preprocessing), encoding="utf8")
        self.auto_map = {auto: f"{Path(MODELING_FILE).stem}.{name}" for auto, name in AUTO_CLASSES.items()}
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **options)
