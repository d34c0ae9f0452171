"""Request and response bodies, as described by OpenAPI."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from allmlp.errors import UserError, one_line
from allmlp.prediction import most_probable
from allmlp.serve.engine import BatchResult

T = TypeVar("T")
MAX_INPUTS = 64
"""Images or texts in one request."""


def not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("the text is empty")
    return text


def whole(number: Any) -> Any:
    """JSON has one kind of number: 5.0 is an integer."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


Endpoint = Literal["predict", "fill", "classify", "answer", "translate", "generate", "forecast"]
"""Function of the model; also the path of its endpoint."""
Text = Annotated[str, Field(min_length=1, max_length=5_000), AfterValidator(not_blank)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)]
TopK = Annotated[int, BeforeValidator(whole), Field(ge=1, le=100, description="Number of predictions to return.")]


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ResponseModel(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class ClassifyRequest(RequestModel):
    """A text, or a pair of texts."""

    text: Text
    text_pair: Annotated[str, Field(max_length=5_000)] = ""
    top_k: TopK = 5


class ClassifyManyRequest(RequestModel):
    """Texts, or pairs of texts."""

    texts: Texts
    text_pairs: Annotated[
        list[Annotated[str, Field(max_length=5_000)]],
        Field(max_length=MAX_INPUTS, description="Empty, or one for each of `texts`."),
    ] = []
    top_k: TopK = 5


class FillRequest(RequestModel):
    text: Annotated[
        Text, Field(description="Text with at least one [MASK].", json_schema_extra={"pattern": r"\[MASK\]"})
    ]
    top_k: TopK = 5


class FillManyRequest(RequestModel):
    texts: Texts
    top_k: TopK = 5


def one_or_many(body: Any) -> str:
    fields = body if isinstance(body, dict) else getattr(type(body), "model_fields", ())
    return "many" if "texts" in fields else "one"


ONE_OR_MANY = Discriminator(one_or_many)
"""Many if the body has the field `texts`."""
One = Annotated[T, Tag("one")]
Many = Annotated[T, Tag("many")]
ClassifyBody = Annotated[One[ClassifyRequest] | Many[ClassifyManyRequest], ONE_OR_MANY]
FillBody = Annotated[One[FillRequest] | Many[FillManyRequest], ONE_OR_MANY]


class AnswerRequest(RequestModel):
    question: Text
    context: Annotated[
        str,
        Field(min_length=1, max_length=20_000, description="The text that contains the answer."),
        AfterValidator(not_blank),
    ]
    top_k: TopK = 5


class AttentionRequest(RequestModel):
    text: Text
    text_pair: Annotated[str, Field(max_length=20_000)] = ""


class TranslateRequest(RequestModel):
    text: Text


class TranslateManyRequest(RequestModel):
    texts: Texts


TranslateBody = Annotated[One[TranslateRequest] | Many[TranslateManyRequest], ONE_OR_MANY]


class GenerateRequest(RequestModel):
    prompt: Annotated[str, Field(max_length=5_000)] = ""
    max_new_tokens: Annotated[int, BeforeValidator(whole), Field(ge=1, le=256)] = 50
    temperature: Annotated[float, Field(ge=0, le=10, description="0 is greedy decoding.")] = 0.8
    top_k: Annotated[int, BeforeValidator(whole), Field(ge=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, BeforeValidator(whole), Field(ge=0, lt=2**63)] | None = None


PastValue = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
PastValues = Annotated[list[PastValue | None], Field(min_length=1, max_length=10_000)]


class ForecastRequest(RequestModel):
    columns: Annotated[
        dict[str, PastValues],
        Field(description="Values of each column of the model, the oldest first; null where one is missing."),
    ]
    last_time: Annotated[
        str, Field(max_length=40, description="Time of the last values; without it the forecast has no times.")
    ] = ""
    id: Annotated[str, Field(max_length=200, description="Which series, if the model was trained on several.")] = ""


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


class ManyResponse(ResponseModel, Generic[T]):
    """Results in the order of the inputs."""

    results: list[T]
    timing: RequestTiming
    """Timing of the slowest input."""


class InputResult(ResponseModel):
    """Result of one of several inputs; `error` describes why it has none."""

    name: str | None = None
    """Name of the file."""
    error: str | None = None


class ClassifiedInput(InputResult):
    predictions: list[LabelPrediction] | None = None


class FilledInput(InputResult):
    predictions: list[list[TokenPrediction]] | None = None


class TranslatedInput(InputResult):
    text: str | None = None


def labels(result: BatchResult, class_names: tuple[str, ...], top_k: int) -> list[LabelPrediction]:
    (row,) = most_probable(result.value[None], class_names, top_k)
    if any(math.isnan(one.probability or 0.0) for one in row):
        raise UserError("the output of the model for this input is NaN")
    return [LabelPrediction.model_validate({"label": one.label, "probability": one.probability}) for one in row]


def classification(result: BatchResult, class_names: tuple[str, ...], top_k: int) -> ClassificationResponse:
    return ClassificationResponse(predictions=labels(result, class_names, top_k), timing=timing(result))


def many_results(
    results: Sequence[BatchResult | BaseException],
    form: Callable[[BatchResult], InputResult],
    names: Sequence[str] | None = None,
) -> ManyResponse[InputResult]:
    """Results of several inputs. A UserError becomes the result of its input; other errors fail the request."""
    answers, slowest = list[InputResult](), BatchResult(None, 0.0, 0.0, 0)
    for number, result in enumerate(results):
        try:
            if isinstance(result, BaseException):
                raise result
            answers.append(form(result))
            slowest = BatchResult(None, *map(max, zip(slowest[1:], result[1:], strict=True)))
        except UserError as reason:
            answers.append(InputResult(error=one_line(reason)))
        answers[-1].name = names[number] if names else None
    return ManyResponse(results=answers, timing=timing(slowest))


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


class ColumnForecast(ResponseModel):
    forecast: list[float]
    """One value for each step; the median of a model of quantiles."""
    quantiles: dict[str, list[float]]
    """By their level; empty if the model has none."""


class ForecastResponse(TimedResponse):
    times: list[str]
    columns: dict[str, ColumnForecast]


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
    text_columns: list[str]
    """Columns of texts that a model of texts was trained on, if known: two for pairs."""
    columns: list[str]
    """Columns of a time-series model."""
    time_column: str
    id_columns: list[str]
    """Columns of the tables that it was trained on."""
    layers: list[LayerInfo]
    """Layers that mix tokens with fixed weights (`maps`), then those that attend (kind `attention`)."""
    max_body_bytes: int
    max_inputs: int
    """Images or texts in one request."""
    path: str
    """Where the endpoints of the model are."""
    device: str
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


class AttentionResponse(MapsResponse):
    """Attention of a layer, a map for each head; over the patches of an image, or from row to column of a text."""

    row_tokens: list[str]
    """Tokens that attend; empty for an image."""
    column_tokens: list[str]
    """Tokens attended to."""


class SampleImage(ResponseModel):
    label: str
    url: str


class SamplesResponse(ResponseModel):
    images: list[SampleImage]
    texts: list[dict[str, str]]
    """Request bodies for the model's endpoint."""


class HealthResponse(ResponseModel):
    status: Literal["ok", "draining"]
    models: list[str]
    in_flight: int


class ErrorResponse(ResponseModel):
    detail: str


ERRORS = {
    400: "The request is malformed.",
    403: "The request comes from a page of another site.",
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
