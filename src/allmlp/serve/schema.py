"""Request and response bodies, as described by OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from allmlp.prediction import most_probable
from allmlp.serve.batching import BatchResult


def not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("the text is empty")
    return text


Endpoint = Literal["predict", "fill", "classify", "answer", "translate", "generate"]
"""What the model can do; also the path of its endpoint."""
Text = Annotated[str, Field(min_length=1, max_length=5_000), AfterValidator(not_blank)]
TopK = Annotated[int, Field(ge=1, le=100, description="Number of predictions to return.")]


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ResponseModel(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class ClassifyRequest(RequestModel):
    """A text, or a pair of texts."""

    text: Text
    text_pair: Annotated[str, Field(max_length=5_000)] = ""
    top_k: TopK = 5


class FillRequest(RequestModel):
    text: Annotated[
        Text, Field(description="Text with at least one [MASK].", json_schema_extra={"pattern": r"\[MASK\]"})
    ]
    top_k: TopK = 5


class AnswerRequest(RequestModel):
    question: Text
    context: Annotated[
        str,
        Field(min_length=1, max_length=20_000, description="The text that contains the answer."),
        AfterValidator(not_blank),
    ]
    top_k: TopK = 5


class TranslateRequest(RequestModel):
    text: Text


class GenerateRequest(RequestModel):
    prompt: Annotated[str, Field(max_length=5_000)] = ""
    max_new_tokens: Annotated[int, Field(ge=1, le=256)] = 50
    temperature: Annotated[float, Field(ge=0, le=10, description="0 is greedy decoding.")] = 0.8
    seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None


class LabelPrediction(ResponseModel):
    label: str
    probability: float


class TokenPrediction(ResponseModel):
    token: str
    probability: float


class AnswerPrediction(ResponseModel):
    """The part of the context from character `start` to `end`."""

    answer: str
    probability: float
    start: int
    end: int


class RequestTiming(ResponseModel):
    decode_ms: float
    """Decoding the request body."""
    queue_ms: float
    model_ms: float
    """Running the model on the batch."""
    batch_size: int


def timing(result: BatchResult) -> RequestTiming:
    seconds = (result.decode_seconds, result.queue_seconds, result.model_seconds)
    decode, queue, model = (round(1e3 * value, 2) for value in seconds)
    return RequestTiming(decode_ms=decode, queue_ms=queue, model_ms=model, batch_size=result.batch_size)


class TimedResponse(ResponseModel):
    timing: RequestTiming


class ClassificationResponse(TimedResponse):
    predictions: list[LabelPrediction]


def classification(result: BatchResult, class_names: tuple[str, ...], top_k: int) -> ClassificationResponse:
    (row,) = most_probable(result.value[None], class_names, top_k)
    predictions = [LabelPrediction.model_validate({"label": one.label, "probability": one.probability}) for one in row]
    return ClassificationResponse(predictions=predictions, timing=timing(result))


class ImportanceResponse(TimedResponse):
    label: str
    probability: float
    importance: list[list[float]]
    """Per patch log p - log p(with the square around it hidden), in nats: positive if it supports the class."""


class FillResponse(TimedResponse):
    predictions: list[list[TokenPrediction]]
    """One list for each [MASK]."""


class AnswerResponse(TimedResponse):
    answers: list[AnswerPrediction]


class TextResponse(TimedResponse):
    text: str


class LayerInfo(ResponseModel):
    name: str
    kind: str
    count: int


class ModelInfo(ResponseModel):
    name: str
    endpoint: Endpoint
    input_spec: str
    num_parameters: int
    img_size: tuple[int, int] | None
    """Height and width of the model's input images."""
    crop_pct: float
    """Size of the center crop, as a fraction of the short side."""
    grid_size: tuple[int, int] | None
    """Rows and columns of patches."""
    class_names: list[str]
    layers: list[LayerInfo]
    """Layers that mix tokens with fixed weights."""
    max_body_bytes: int
    version: str


class MapsResponse(ResponseModel):
    """Token-mixing weights of a layer: `count` maps of height x width, quantized to int8."""

    layer: str
    kind: str
    count: int
    height: int
    width: int
    scale: float
    """Multiply the int8 values by this to get the weights."""
    data: Annotated[str, Field(json_schema_extra={"contentEncoding": "base64"})]


class SampleImage(ResponseModel):
    label: str
    url: str


class SamplesResponse(ResponseModel):
    images: list[SampleImage]
    texts: list[dict[str, str]]
    """Request bodies for the model's endpoint."""


class HealthResponse(ResponseModel):
    status: Literal["ok", "draining"]
    model: str
    in_flight: int


class ErrorResponse(ResponseModel):
    detail: str


ERRORS = {
    400: "The request is malformed.",
    404: "Not found.",
    408: "The request was sent too slowly.",
    413: "The request body is too large.",
    415: "The content type is not supported.",
    422: "The request is invalid.",
    503: "The server is busy or shutting down; see Retry-After.",
    504: "The request timed out.",
}


def error_responses(*codes: int) -> dict[int | str, dict[str, Any]]:
    """Describe the errors of a route for OpenAPI."""
    after = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return {
        code: {"model": ErrorResponse, "description": ERRORS[code], **({"headers": after} if code == 503 else {})}
        for code in codes
    }
