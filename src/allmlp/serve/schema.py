"""What is asked and answered, as OpenAPI describes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from allmlp.serve.batching import Done


def readable(text: str) -> str:
    if not text.strip():
        raise ValueError("the text is empty")
    return text


Ability = Literal["predict", "fill", "classify", "answer", "translate", "generate"]
"""The one thing a model is asked; its path."""
Text = Annotated[str, Field(min_length=1, max_length=5_000), AfterValidator(readable)]
Top = Annotated[int, Field(ge=1, le=100, description="How many of the likeliest are named.")]


class Shape(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Sentence(Strict):
    """A sentence; for classifiers of pairs with the second one."""

    text: Text
    context: Annotated[str, Field(max_length=5_000)] = ""
    top: Top = 5


class Masked(Strict):
    text: Annotated[
        Text, Field(description="Text with at least one [MASK].", json_schema_extra={"pattern": r"\[MASK\]"})
    ]
    top: Top = 5


class Question(Strict):
    text: Annotated[Text, Field(description="The question.")]
    context: Annotated[
        str,
        Field(min_length=1, max_length=20_000, description="The text in which its answer stands."),
        AfterValidator(readable),
    ]
    top: Top = 5


class Source(Strict):
    text: Text


class Beginning(Strict):
    text: Annotated[str, Field(max_length=5_000, description="How the text begins.")] = ""
    tokens: Annotated[int, Field(ge=1, le=256, description="How many to write at most.")] = 50
    temperature: Annotated[float, Field(ge=0, le=10, description="0 takes the likeliest.")] = 0.8
    seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None


class Named(Shape):
    name: str
    probability: float


class Span(Named):
    """A part of the context, from character `start` to `end`."""

    start: int
    end: int


class Timing(Shape):
    """In milliseconds."""

    read: float
    """From bytes to what the model is given."""
    wait: float
    """In the queue."""
    model: float
    batch: int
    """So many requests went through the model together."""


def timing(done: Done) -> Timing:
    read, wait, model = (round(1e3 * seconds, 2) for seconds in (done.read, done.waited, done.ran))
    return Timing(read=read, wait=wait, model=model, batch=done.batch)


class Answer(Shape):
    timing: Timing


class Prediction(Answer):
    answers: list[Named]


class Importance(Answer):
    name: str
    probability: float
    rows: list[list[float]]
    """For each patch log p - log p(with its square hidden), in nats: positive where it speaks for the class."""


class Fillings(Answer):
    masks: list[list[Named]]
    """For every [MASK], from the first to the last."""


class Spans(Answer):
    answers: list[Span]


class Written(Answer):
    text: str


class Layer(Shape):
    name: str
    kind: str
    count: int


class Facts(Shape):
    """The model that is served."""

    name: str
    ability: Ability
    reads: str
    parameters: int
    size: tuple[int, int] | None
    """Height and width of the pictures it is shown."""
    crop: float
    """The share of a picture's short side that it sees."""
    grid: tuple[int, int] | None
    classes: list[str]
    layers: list[Layer]
    """Where tokens mix with fixed weights."""
    body_limit: int
    version: str


class Maps(Shape):
    """Token-mixing weights of a layer: `count` maps of height x width, one signed byte each, base64."""

    layer: str
    kind: str
    count: int
    height: int
    width: int
    largest: float
    """The weight that 127 stands for."""
    data: Annotated[str, Field(json_schema_extra={"contentEncoding": "base64"})]


class Sample(Shape):
    name: str
    url: str


class Samples(Shape):
    pictures: list[Sample]
    texts: list[dict[str, str]]


class Health(Shape):
    status: Literal["ok", "draining"]
    model: str
    in_flight: int


class Trouble(Shape):
    detail: str


TROUBLES = {
    400: "The request is not HTTP as it should be.",
    404: "There is no such thing here.",
    408: "The request was sent too slowly.",
    413: "The request is too large.",
    415: "The body is of a type that is not read here.",
    422: "The request is understood and cannot be answered.",
    503: "The server is busy or shutting down; Retry-After says when to come again.",
    504: "There was no answer in time.",
}


def troubles(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The answers of a route that are no result."""
    after = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return {
        code: {"model": Trouble, "description": TROUBLES[code], **({"headers": after} if code == 503 else {})}
        for code in codes
    }
