"""This library's models as models of transformers: configuration, one class per task, image processor.

`allmlp.hf.code` makes one file of this module and of everything it imports, which is saved beside the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.image_transforms import to_pil_image
from transformers.image_utils import make_flat_list_of_images
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils import can_return_tuple

from allmlp.data.decode import Decode, crop_and_resize
from allmlp.data.preprocessing import PREPROCESSING_FILE, ImagePreprocessing, TextPreprocessing
from allmlp.errors import UserError
from allmlp.hf.code import MODELING_FILE, export_code
from allmlp.layers.context import Cache
from allmlp.layers.head import ClassifierHead, LMHead, PooledHead, QAHead
from allmlp.layers.pool import MeanPool
from allmlp.layers.stem import PatchEmbed, TokenEmbed
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from allmlp.spec import from_dict, to_dict, to_json

AUTO_MAP = {
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


class AllMlpConfig(PreTrainedConfig):
    """The spec of a model as JSON, the names of its classes, and the preprocessing of its images.

    With another number of labels than the spec has, the model gets a head for that number.
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
            raise UserError(f"transformers can use models of this library, not {type(spec).__name__}")
        return spec

    @property
    def stem(self) -> Any:
        spec = self.model_spec()
        return spec.stem if isinstance(spec, Encoder) else spec.encoder.stem

    @property
    def hidden_size(self) -> int:
        spec = self.model_spec()
        return spec.width if isinstance(spec, Encoder) else spec.encoder.width

    @property
    def num_hidden_layers(self) -> int:
        spec = self.model_spec()
        return spec.depth if isinstance(spec, Encoder) else spec.decoder.depth

    @property
    def vocab_size(self) -> int | None:
        return getattr(self.stem, "vocab_size", None)

    @property
    def max_position_embeddings(self) -> int:
        return self.stem.tokens

    def preprocessing(self) -> ImagePreprocessing | TextPreprocessing | None:
        """What `allmlp` needs to know about the inputs and classes; None if the normalization of images is unknown."""
        spec, labels = self.model_spec(), list((self.id2label or {}).values())
        head = getattr(spec, "head", None)
        classifies = isinstance(head, (ClassifierHead, PooledHead))
        named = classifies and labels != [f"LABEL_{number}" for number in range(len(labels))]
        class_names = tuple(map(str, labels)) if named else ()
        if isinstance(self.stem, TokenEmbed):
            span, translation = isinstance(head, QAHead), isinstance(spec, EncoderDecoder)
            task = "classes" if classifies else "span" if span else "translation" if translation else "text"
            return TextPreprocessing(task, self.stem.tokens, class_names)
        if self.image_mean is None or self.image_std is None:
            return None
        task = "values" if self.problem_type == "regression" else "classes"
        return ImagePreprocessing(
            tuple(self.image_mean), tuple(self.image_std), class_names, self.crop_pct or 1.0, task
        )

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **options: Any) -> None:
        """Also write the modelling file, for those who do not have allmlp, and preprocessing.json for those who do."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MODELING_FILE).write_text(export_code(), encoding="utf8")
        preprocessing = self.preprocessing()
        if preprocessing is not None:
            (folder / PREPROCESSING_FILE).write_text(to_json(preprocessing), encoding="utf8")
        self.auto_map = {auto: f"{Path(MODELING_FILE).stem}.{name}" for auto, name in AUTO_MAP.items()}
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **options)


class AllMlpPreTrainedModel(PreTrainedModel):
    """A model of this library, `model`, behind the interface of transformers."""

    config_class = AllMlpConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    reads: ClassVar[Any] = TokenEmbed
    """The kinds of stem that the task needs."""

    def __init__(self, config: AllMlpConfig) -> None:
        spec = self.adapt(self.check_task(config.model_spec()), config)
        config.spec = to_dict(spec)
        super().__init__(config)
        self.model: Any = spec.build()
        self.post_init()

    @classmethod
    def check_task(cls, spec: Any) -> Any:
        """Raise UserError if the model cannot do this task, whatever its head."""
        if not isinstance(spec, Encoder) or not isinstance(spec.stem, cls.reads):
            raise UserError(f"{cls.__name__} cannot be made of a model that reads {spec.input_spec}")
        return spec

    @classmethod
    def adapt(cls, spec: Any, config: AllMlpConfig) -> Any:
        """The spec with the head of this task."""
        raise NotImplementedError

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the parameters that a checkpoint lacks as the spec says; those that were loaded are kept."""
        own = module.parameters(recurse=False)
        loaded = [(weight, weight.clone()) for weight in own if getattr(weight, "_is_hf_initialized", False)]
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
        for weight, value in loaded:
            weight.copy_(value)

    def _set_gradient_checkpointing(self, enable: bool = True, **options: Any) -> None:
        self.model.set_grad_checkpointing(enable)

    def get_input_embeddings(self) -> nn.Module:
        stem = (self.model.encoder if self.config.is_encoder_decoder else self.model).stem
        return getattr(stem, "embedding", None) or stem

    def resize_token_embeddings(self, *args: Any, **options: Any) -> Any:
        raise UserError("the vocabulary of a model is part of its spec: create it with another vocab_size")

    def encode(
        self,
        x: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Cache | None = None,
        output_hidden_states: bool | None = None,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...] | None]:
        """The output of the head, the features before pooling, and those after the stem and each block if wanted."""
        mask = None if attention_mask is None else attention_mask.bool()
        segments = token_type_ids if (getattr(self.model.spec.stem, "segments", None) or 0) > 1 else None
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        found: dict[str, Tensor] | None = {} if wanted else None
        features = self.model.forward_features(
            x, mask, segments=segments, inputs_embeds=inputs_embeds, cache=cache, intermediates=found
        )
        names = ["stem", *(f"blocks.{number}" for number in range(self.model.spec.depth))]
        hidden_states = None if found is None else tuple(found[name] for name in names)
        return self.model.forward_head(features, mask), features, hidden_states


class AllMlpModel(AllMlpPreTrainedModel):
    """Features of images or texts: `last_hidden_state` and, if the model has a pool, `pooler_output`."""

    reads = (PatchEmbed, TokenEmbed)
    _keys_to_ignore_on_load_unexpected = [r"^model\.head\."]  # noqa: RUF012

    @classmethod
    def adapt(cls, spec: Any, config: AllMlpConfig) -> Any:
        return spec.replace(head=None)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        x = input_ids if pixel_values is None else pixel_values
        pooled, features, hidden = self.encode(
            x, attention_mask, token_type_ids, inputs_embeds, None, output_hidden_states
        )
        return BaseModelOutputWithPooling(features, None if self.model.pool is None else pooled, hidden)


class AllMlpForImageClassification(AllMlpPreTrainedModel):
    main_input_name = "pixel_values"
    reads = PatchEmbed

    @classmethod
    def adapt(cls, spec: Any, config: AllMlpConfig) -> Any:
        return spec.replace(head=spec.with_classes(config.num_labels))

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        logits, _, hidden = self.encode(pixel_values, output_hidden_states=output_hidden_states)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(loss, logits, hidden)


class AllMlpForSequenceClassification(AllMlpPreTrainedModel):
    @classmethod
    def adapt(cls, spec: Any, config: AllMlpConfig) -> Any:
        if isinstance(spec.head, (ClassifierHead, PooledHead)):
            return spec.replace(head=spec.with_classes(config.num_labels))
        return spec.replace(pool=spec.pool or MeanPool(), head=ClassifierHead(config.num_labels))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        logits, _, hidden = self.encode(
            input_ids, attention_mask, token_type_ids, inputs_embeds, None, output_hidden_states
        )
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return SequenceClassifierOutput(loss, logits, hidden)


class AllMlpForQuestionAnswering(AllMlpPreTrainedModel):
    """Logits at padding are the lowest number there is."""

    @classmethod
    def adapt(cls, spec: Any, config: AllMlpConfig) -> Any:
        return spec.replace(pool=None, head=QAHead())

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        logits, _, hidden = self.encode(
            input_ids, attention_mask, token_type_ids, inputs_embeds, None, output_hidden_states
        )
        if attention_mask is not None:
            logits = logits.masked_fill(~attention_mask.bool().unsqueeze(2), torch.finfo(logits.dtype).min)
        start, end = logits.unbind(2)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(loss, start, end, hidden)


def with_language_head(spec: Encoder) -> Encoder:
    return spec.replace(pool=None, head=spec.head if isinstance(spec.head, LMHead) else LMHead())


class AllMlpForMaskedLM(AllMlpPreTrainedModel):
    @classmethod
    def adapt(cls, spec: Any, config: AllMlpConfig) -> Any:
        if spec.block.causal:
            raise UserError("a causal model cannot fill masks: use AutoModelForCausalLM")
        return with_language_head(spec)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        logits, _, hidden = self.encode(
            input_ids, attention_mask, token_type_ids, inputs_embeds, None, output_hidden_states
        )
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        return MaskedLMOutput(loss, logits, hidden)


class Generates(GenerationMixin):
    """`generate` with the cache of this library."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # token mixing caches other things than keys and values

    def _reorder_cache(self, past_key_values: Cache, beam_idx: Tensor) -> Cache:
        past_key_values.reorder(beam_idx)
        return past_key_values


class AllMlpForCausalLM(AllMlpPreTrainedModel, Generates):
    """Padding may be on either side: positions count from the first token that is none."""

    @classmethod
    def adapt(cls, spec: Any, config: AllMlpConfig) -> Any:
        if not spec.block.causal:
            raise UserError("the model is not causal: use AutoModelForMaskedLM, or create it with causal mixing")
        return with_language_head(spec)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        cache = Cache() if use_cache and past_key_values is None else past_key_values
        inputs: Any = [input_ids, token_type_ids, inputs_embeds]
        left = None if attention_mask is None or cache is not None else attention_mask.int().argmax(1)
        if left is not None:
            inputs = [None if x is None else shift(x, left) for x in inputs]
        # Padding on the right needs no mask: a causal model does not look there.
        ids, segments, embeds = inputs
        logits, _, hidden = self.encode(ids, None, segments, embeds, cache, output_hidden_states)
        if left is not None:
            logits = shift(logits, -left)
            hidden = None if hidden is None else tuple(shift(x, -left) for x in hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(loss, logits, cache, hidden)  # type: ignore[arg-type]

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if not use_cache or (attention_mask is not None and not bool(attention_mask.all())):
            # Rows of different lengths are at different positions, which the cache cannot hold: compute all again.
            return {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        cache = past_key_values or Cache()
        return {"input_ids": input_ids[:, cache.length :], "past_key_values": cache}


def shift(x: Tensor, left: Tensor) -> Tensor:
    """Rotate each row of `x` (b s ...) by its own number of tokens to the left."""
    columns = (torch.arange(x.shape[1], device=x.device) + left[:, None]) % x.shape[1]
    return x[torch.arange(len(x), device=x.device)[:, None], columns]


class SourceEncoder(nn.Module):
    """The encoder of a translation model as `generate` calls it."""

    def __init__(self, model: EncoderDecoderModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        mask = None if attention_mask is None else attention_mask.bool()
        return BaseModelOutput(self.model.encoder.forward_features(input_ids, mask, inputs_embeds=inputs_embeds))


class AllMlpForSeq2SeqLM(AllMlpPreTrainedModel, Generates):
    """Translation. Labels are the target without its first token, which is `decoder_start_token_id`."""

    def __init__(self, config: AllMlpConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # the labels are not shifted: the decoder's input is

    @classmethod
    def check_task(cls, spec: Any) -> Any:
        if not isinstance(spec, EncoderDecoder):
            raise UserError(f"translation needs an encoder and a decoder, not a model that reads {spec.input_spec}")
        return spec

    @classmethod
    def adapt(cls, spec: Any, config: AllMlpConfig) -> Any:
        return spec

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        return SourceEncoder(self.model)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            raise UserError("set config.decoder_start_token_id and config.pad_token_id to train on labels alone")
        first = labels.new_full((len(labels), 1), start)
        return torch.cat([first, labels[:, :-1].masked_fill(labels[:, :-1] < 0, pad)], dim=1)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        cache = Cache() if use_cache and past_key_values is None else past_key_values
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(input_ids, attention_mask, inputs_embeds)
        if decoder_input_ids is None:
            if labels is None:
                raise UserError("pass decoder_input_ids or labels")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        mask = None if attention_mask is None else attention_mask.bool()
        # Padding of the target is on the right, where the decoder does not look.
        logits = self.model.decode(decoder_input_ids, encoder_outputs[0], mask, cache=cache)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        return Seq2SeqLMOutput(loss, logits, cache, encoder_last_hidden_state=encoder_outputs[0])  # type: ignore[arg-type]

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        encoder_outputs: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        cache = (past_key_values or Cache()) if use_cache else None
        start = 0 if cache is None else cache.length
        return {
            "decoder_input_ids": input_ids[:, start:],
            "past_key_values": cache,
            "attention_mask": attention_mask,
            "encoder_outputs": encoder_outputs,
        }


class AllMlpImageProcessor(BaseImageProcessor):
    """The preprocessing of this library: resize (bicubic) and center crop in one step, then normalization."""

    model_input_names: ClassVar[list[str]] = ["pixel_values"]

    def __init__(
        self,
        size: dict[str, int] | None = None,
        image_mean: list[float] | None = None,
        image_std: list[float] | None = None,
        crop_pct: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.size = size or {"height": 224, "width": 224}
        self.image_mean, self.image_std = image_mean or [0.5] * 3, image_std or [0.5] * 3
        self.crop_pct = crop_pct

    def preprocess(self, images: Any, return_tensors: Any = None, **options: Any) -> BatchFeature:
        """`pixel_values` of PIL images, arrays, tensors, paths or URLs."""
        mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (self.image_mean, self.image_std))
        decode = Decode(crop_pct=self.crop_pct, color="rgb" if len(mean) == 3 else "gray")
        size = self.size["height"], self.size["width"]
        found = make_flat_list_of_images(self.fetch_images(images))
        pixels = [
            crop_and_resize(one if hasattr(one, "getexif") else to_pil_image(one), size, decode, None) for one in found
        ]
        values = (torch.stack(pixels).float().div(255) - mean) / std
        return BatchFeature({"pixel_values": values}, tensor_type=return_tensors)

    def to_dict(self) -> dict[str, Any]:
        """Without the class, which is in the model's configuration: here a pipeline would look for a video class too."""
        hidden = ("image_processor_type", "auto_map")
        return {name: value for name, value in super().to_dict().items() if name not in hidden}
