"""This library's models as models of transformers, one class per task.

`allmlp.hf.code` combines this module and its imports into one file, which is saved beside the weights.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from allmlp.errors import UserError
from allmlp.hf.config import AllMlpConfig
from allmlp.layers.context import Cache
from allmlp.layers.head import ClassifierHead, LMHead, PooledHead, QAHead
from allmlp.layers.pool import MeanPool
from allmlp.layers.stem import PatchEmbed, TokenEmbed
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from allmlp.spec import to_dict


class AllMlpPreTrainedModel(PreTrainedModel):
    """A model of this library, `model`, behind the interface of transformers."""

    config_class = AllMlpConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    stems: ClassVar[tuple[type, ...]] = (TokenEmbed,)
    """Stems, that is inputs, for which the task is possible."""
    may_read_padding: ClassVar[bool] = True
    """Whether `mask_padding` of the configuration applies: not to language models."""

    def __init__(self, config: AllMlpConfig) -> None:
        spec = self.adapt(config.model_spec(), config)
        config.spec = to_dict(spec)
        super().__init__(config)
        self.model: Any = spec.build()
        self.post_init()

    @classmethod
    def adapt(cls, spec: Any, config: AllMlpConfig) -> Any:
        """The spec with the head of this task; UserError if the task is impossible with any head."""
        if not isinstance(spec, Encoder) or not isinstance(spec.stem, cls.stems):
            raise UserError(f"{cls.__name__} cannot be made of a model that reads {spec.input_spec}")
        return cls.with_head(spec, config)

    @classmethod
    def with_head(cls, spec: Encoder, config: AllMlpConfig) -> Encoder:
        raise NotImplementedError

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the parameters that a checkpoint lacks as the spec says; those that were loaded are kept."""
        parameters = module.parameters(recurse=False)
        loaded = [(weight, weight.clone()) for weight in parameters if getattr(weight, "_is_hf_initialized", False)]
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
        for weight, value in loaded:
            weight.copy_(value)

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **options: Any) -> None:
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
        output_hidden_states: bool | None = None,
        cache: Cache | None = None,
    ) -> Any:
        """Output of the head, features before pooling, and, if requested, those after the stem and each block."""
        spec, mask = self.model.spec, None if attention_mask is None else attention_mask.bool()
        segments = token_type_ids if (getattr(spec.stem, "segments", None) or 0) > 1 else None
        needs_hidden_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        activations: dict[str, Tensor] | None = {} if needs_hidden_states else None
        reads_padding = self.may_read_padding and not self.config.mask_padding
        if reads_padding and x is None:
            raise UserError("the model reads padding, whose ids it needs: pass input_ids, not inputs_embeds")
        length = x.shape[1] if reads_padding and x is not None else None
        if x is not None and length is not None:
            if self.config.pad_token_id is None:
                raise UserError("the model reads padding: set config.pad_token_id")
            x = pad_right(x, spec.stem.tokens, self.config.pad_token_id)
            segments = pad_right(segments, spec.stem.tokens)
            mask = None
        features = self.model.forward_features(
            x, mask, segments=segments, inputs_embeds=inputs_embeds, cache=cache, intermediates=activations
        )
        names = ["stem", *(f"blocks.{number}" for number in range(spec.num_blocks))]
        hidden_states = None if activations is None else tuple(activations[name][:, :length] for name in names)
        output = self.model.forward_head(features, mask)
        return output[:, :length] if output.dim() == 3 else output, features[:, :length], hidden_states

    def loss(self, logits: Tensor, labels: Tensor | None, **kwargs: Any) -> Any:
        """The loss that transformers uses for this task."""
        if labels is None:
            return None
        if self.loss_type in ("ForMaskedLM", "ForCausalLM"):
            return self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        return self.loss_function(labels, logits, self.config, **kwargs)


def pad_right(x: Tensor | None, tokens: int, value: int = 0) -> Any:
    """Pad rows of ids (b s) on the right to this number of tokens."""
    return None if x is None else nn.functional.pad(x, (0, max(tokens - x.shape[1], 0)), value=value)


class AllMlpModel(AllMlpPreTrainedModel):
    """Features of images or texts: `last_hidden_state` and, if the model has a pool, `pooler_output`."""

    stems = (PatchEmbed, TokenEmbed)
    _keys_to_ignore_on_load_unexpected = [r"^model\.head\."]  # noqa: RUF012

    @classmethod
    def with_head(cls, spec: Encoder, config: AllMlpConfig) -> Encoder:
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
        pooled, features, hidden = self.encode(x, attention_mask, token_type_ids, inputs_embeds, output_hidden_states)
        return BaseModelOutputWithPooling(features, None if self.model.pool is None else pooled, hidden)


class AllMlpForImageClassification(AllMlpPreTrainedModel):
    main_input_name = "pixel_values"
    stems = (PatchEmbed,)

    @classmethod
    def with_head(cls, spec: Encoder, config: AllMlpConfig) -> Encoder:
        return spec.replace(head=spec.with_classes(config.num_labels or 0))

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        logits, _, hidden = self.encode(pixel_values, output_hidden_states=output_hidden_states)
        return ImageClassifierOutput(self.loss(logits, labels, **kwargs), logits, hidden)


class AllMlpForText(AllMlpPreTrainedModel):
    """A text encoder with one output and one tensor of labels."""

    output_class: ClassVar[Any]

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
    ) -> Any:
        logits, _, hidden = self.encode(input_ids, attention_mask, token_type_ids, inputs_embeds, output_hidden_states)
        return self.output_class(self.loss(logits, labels, **kwargs), logits, hidden)


class AllMlpForSequenceClassification(AllMlpForText):
    output_class = SequenceClassifierOutput

    @classmethod
    def with_head(cls, spec: Encoder, config: AllMlpConfig) -> Encoder:
        num_labels = config.num_labels or 0
        if isinstance(spec.head, (ClassifierHead, PooledHead)):
            return spec.replace(head=spec.with_classes(num_labels))
        return spec.replace(pool=spec.pool or MeanPool(), head=ClassifierHead(num_labels))


class AllMlpForMaskedLM(AllMlpForText):
    output_class = MaskedLMOutput
    may_read_padding = False

    @classmethod
    def with_head(cls, spec: Encoder, config: AllMlpConfig) -> Encoder:
        if spec.block.causal:
            raise UserError("a causal model cannot fill masks: use AutoModelForCausalLM")
        return spec if isinstance(spec.head, LMHead) else spec.replace(pool=None, head=LMHead())


class AllMlpForQuestionAnswering(AllMlpPreTrainedModel):
    """Logits at padding are the minimum of the dtype."""

    @classmethod
    def with_head(cls, spec: Encoder, config: AllMlpConfig) -> Encoder:
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
        logits, _, hidden = self.encode(input_ids, attention_mask, token_type_ids, inputs_embeds, output_hidden_states)
        if attention_mask is not None:
            logits = logits.masked_fill(~attention_mask.bool().unsqueeze(2), torch.finfo(logits.dtype).min)
        start, end = logits.unbind(2)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(loss, start, end, hidden)


class GenerationCache(Cache):
    """A cache with what `generate` reads of one that is passed to it."""

    is_compileable = False

    def get_seq_length(self) -> int:
        return self.length


class AllMlpGenerationMixin(GenerationMixin):
    """`generate` with the cache of this library."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # token mixing does not cache keys and values

    def _reorder_cache(self, past_key_values: Cache, beam_idx: Tensor) -> Cache:
        past_key_values.reorder(beam_idx)
        return past_key_values


class AllMlpForCausalLM(AllMlpPreTrainedModel, AllMlpGenerationMixin):
    """Padding may be on either side: positions count from the first real token."""

    may_read_padding = False

    @classmethod
    def with_head(cls, spec: Encoder, config: AllMlpConfig) -> Encoder:
        if not spec.block.causal:
            raise UserError("the model is not causal: use AutoModelForMaskedLM, or create it with causal mixing")
        return spec if isinstance(spec.head, LMHead) else spec.replace(pool=None, head=LMHead())

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        cache: Any = past_key_values
        if cache is None and kwargs.get("position_ids") is not None:
            check_positions(kwargs["position_ids"], attention_mask)
        if use_cache and cache is None and (attention_mask is None or bool(attention_mask.all())):
            cache = GenerationCache()  # the cache cannot hold rows at different positions
        left = None if attention_mask is None or cache is not None else attention_mask.int().argmax(1)
        ids, segments, embeds = (shift(x, left) for x in (input_ids, token_type_ids, inputs_embeds))
        # Padding on the right needs no mask: a causal model does not see it.
        logits, _, hidden = self.encode(ids, None, segments, embeds, output_hidden_states, cache)
        # Before rows are moved back, where padding would predict the first token.
        loss = self.loss(logits, shift(labels, left), **kwargs)
        logits, *hidden = [shift(x, None if left is None else -left) for x in (logits, *(hidden or ()))]
        return CausalLMOutputWithPast(loss, logits, cache, tuple(hidden) or None)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if not use_cache or (attention_mask is not None and not bool(attention_mask.all())):
            # Rows of different lengths are at different positions, which the cache cannot hold: recompute everything.
            return {"input_ids": input_ids, "attention_mask": attention_mask}
        cache = past_key_values or GenerationCache()
        return {"input_ids": input_ids[:, cache.length :], "past_key_values": cache}


# For label_smoothing_factor the Trainer computes the loss, and moves the labels of the models named here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["allmlp"] = "AllMlpForCausalLM"


def check_positions(positions: Tensor, mask: Tensor | None) -> None:
    """Raise UserError unless the positions, b s, of the real tokens are 0, 1, 2, ..., as the model has them."""
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask.bool()
    if bool(((positions != real.cumsum(1) - 1) & real).any()):
        raise UserError(
            "position_ids are not 0, 1, 2, ... in every row, as for several documents in one, which the model would "
            "mix: use a collator that pads them"
        )


def shift(x: Any, left: Tensor | None) -> Any:
    """Rotate each row of `x` (b s ...) to the left by its own number of tokens."""
    if x is None or left is None:
        return x
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
        features: Any = self.model.encoder.forward_features(input_ids, mask, inputs_embeds=inputs_embeds)
        return BaseModelOutput(features)


class AllMlpForSeq2SeqLM(AllMlpPreTrainedModel, AllMlpGenerationMixin):
    """Translation. Labels are the target without its first token, which is `decoder_start_token_id`."""

    def __init__(self, config: AllMlpConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # not shifted: the decoder's input is

    @classmethod
    def adapt(cls, spec: Any, config: AllMlpConfig) -> Any:
        if not isinstance(spec, EncoderDecoder):
            raise UserError(f"{cls.__name__} needs an encoder and a decoder, not a model that reads {spec.input_spec}")
        return spec

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        return SourceEncoder(self.model)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            raise UserError("set config.decoder_start_token_id and config.pad_token_id to train on labels alone")
        before = labels[:, :-1]
        return torch.cat([labels.new_full((len(labels), 1), start), before.masked_fill(before < 0, pad)], dim=1)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        cache: Any = GenerationCache() if use_cache and past_key_values is None else past_key_values
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(input_ids, attention_mask, inputs_embeds)
        if decoder_input_ids is None:
            if labels is None:
                raise UserError("pass decoder_input_ids or labels")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        mask = None if attention_mask is None else attention_mask.bool()
        # Padding of the target is on the right, which the decoder does not see.
        logits = self.model.decode(decoder_input_ids, encoder_outputs[0], mask, cache=cache)
        loss = self.loss(logits, labels, **kwargs)
        return Seq2SeqLMOutput(loss, logits, cache, encoder_last_hidden_state=encoder_outputs[0])

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        encoder_outputs: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        cache = (past_key_values or GenerationCache()) if use_cache else None
        return {
            "decoder_input_ids": input_ids if cache is None else input_ids[:, cache.length :],
            "past_key_values": cache,
            "attention_mask": attention_mask,
            "encoder_outputs": encoder_outputs,
        }
