"""What is asked over HTTP is what the library answers; what goes wrong is one line and no 500."""

from __future__ import annotations

import base64
import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

import allmlp
from allmlp.analysis.saliency import occlusion
from allmlp.predict import predict, predict_text
from allmlp.serve.app import application, open_service
from allmlp.serve.batching import Batcher
from allmlp.serve.limits import Allowed
from allmlp.serve.page import page_files, samples
from allmlp.serve.pictures import SQUARES, PictureService
from allmlp.weights.pretrained import shipped
from data.pictures import BROKEN, encode, scene
from serve.folders import CLASSES, GIVES, picture_folder, text_folder

LIMIT = 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_folder(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(application(open_service(folder), "small", allowed=Allowed(body=LIMIT))) as made:
        yield made


# --- pictures --------------------------------------------------------------------------------------------------------


def answers(response: Any) -> list[tuple[str, float]]:
    assert response.status_code == 200, response.text
    return [(found["name"], found["probability"]) for found in response.json()["answers"]]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_it_says_what_the_command_says(client: TestClient, folder: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "picture"
    file.write_bytes(encode(scene(50, 30), kind))
    (expected,) = predict(folder, [file], top=2)
    data = file.read_bytes()
    ways = [
        client.post("/predict?top=2", content=data, headers={"content-type": f"image/{kind.lower()}"}),
        client.post("/predict?top=2", content=data, headers={"content-type": "application/octet-stream"}),
        client.post("/predict?top=2", content=data, headers={"content-type": "application/x-www-form-urlencoded"}),
        client.post("/predict?top=2", files={"file": ("../../etc/passwd", data)}, data={"more": "fields"}),
    ]
    for response in ways:
        assert answers(response) == [(name, pytest.approx(chance, abs=1e-6)) for name, chance in expected]
        timing = response.json()["timing"]
        assert timing["batch"] == 1 and timing["model"] > 0 and timing["read"] > 0


def test_batches_do_not_change_an_answer(client: TestClient) -> None:
    pictures = [encode(scene(40, 30, seed)) for seed in range(12)]
    alone = [answers(client.post("/predict", content=data)) for data in pictures]
    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(lambda data: answers(client.post("/predict", content=data)), pictures))
    for one, other in zip(alone, together):
        assert [name for name, _ in one] == [name for name, _ in other]
        assert [chance for _, chance in one] == pytest.approx([chance for _, chance in other], abs=1e-5)


def test_importance_is_occlusion(client: TestClient, folder: Path) -> None:
    data = encode(scene(12, 8))
    service = open_service(folder)
    image = service.batch([service.read(data)])[0]  # type: ignore[union-attr]
    for name in CLASSES:
        expected = occlusion(allmlp.load(folder), image, CLASSES.index(name), SQUARES)
        found = client.post(f"/importance?name={name}", content=data).json()
        assert found["name"] == name
        assert torch.tensor(found["rows"]) == pytest.approx(expected.numpy(), abs=1e-3)
    best = answers(client.post("/predict", content=data))[0]
    found = client.post("/importance", content=data).json()
    assert (found["name"], found["probability"]) == (best[0], pytest.approx(best[1], abs=1e-6))


def test_maps_are_the_weights(client: TestClient, folder: Path) -> None:
    model = allmlp.load(folder)
    layers = client.get("/model").json()["layers"]
    assert [layer["name"] for layer in layers] == [f"blocks.{number}.channel.mix.inner.proj" for number in (0, 1)]
    for layer in layers:
        found = client.get("/maps", params={"layer": layer["name"]}).json()
        assert (found["count"], found["height"], found["width"]) == (6, 2, 3)
        values = np.frombuffer(base64.b64decode(found["data"]), np.int8).reshape(6, 6) * found["largest"] / 127
        weight = model.get_parameter(f"{layer['name']}.weight").detach().numpy()
        assert found["largest"] == pytest.approx(abs(weight).max(), rel=1e-6)
        assert values == pytest.approx(weight, abs=found["largest"] / 127)


def test_a_mixer_in_grey_is_served_too(tmp_path: Path) -> None:
    with TestClient(application(open_service(picture_folder(tmp_path, channels=1, mixer=True)), "grey")) as client:
        assert len(answers(client.post("/predict", content=encode(scene())))) == 3
        (first, _) = client.get("/model").json()["layers"]
        found = client.get("/maps", params={"layer": first["name"]}).json()
        assert (found["kind"], found["count"], found["height"], found["width"]) == ("units", 10, 2, 3)


def test_the_page_and_its_samples(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    links = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert links and not any("//" in link for link in links)
    for link in links:
        assert client.get(f"/{link}").status_code == 200, link
    samples = client.get("/samples").json()["pictures"]
    assert {sample["name"] for sample in samples} == set(CLASSES)
    for sample in samples:
        assert answers(client.post("/predict", content=client.get(sample["url"]).content))


def test_samples_are_of_the_models_own_classes() -> None:
    served = page_files()

    def names(*classes: str) -> set[str]:
        return {sample.name for sample in samples(served, "predict", classes).pictures}

    assert names(*map(str, range(10))) == {"0", "2", "3", "5", "7", "8"}
    assert names("frog", "prince") == {"frog"}
    assert len(names("prince")) == len([path for path in served if path.startswith("/samples/")])
    assert not samples(served, "fill", ()).pictures and samples(served, "fill", ()).texts


def test_the_model_that_comes_along_names_its_samples() -> None:
    service = open_service(shipped())
    assert isinstance(service, PictureService)
    found = samples(served := page_files(), "predict", service.classes).pictures
    assert {sample.name for sample in found} == set(service.classes)
    for sample in found:
        (chances,) = service.classify([service.read(bytes(served[sample.url].body))])
        assert service.classes[int(chances.argmax())] == sample.name and chances.max() > 0.6


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/predict", "/importance"])
@pytest.mark.parametrize("fault", BROKEN)
def test_broken_pictures(client: TestClient, path: str, fault: str) -> None:
    response = client.post(path, content=BROKEN[fault])
    assert response.status_code == 422 and list(response.json()) == ["detail"], response.text


@pytest.mark.parametrize(
    ("call", "status", "words"),
    [
        (("POST", "/predict?top=0", b"x"), 422, "top: Input should be greater"),
        (("POST", "/predict?top=x", b"x"), 422, "valid integer"),
        (("POST", "/importance?name=dgo", b"x"), 422, "did you mean 'dog'?"),
        (("GET", "/predict", b""), 405, "Not Allowed"),
        (("GET", "/maps?layer=x", b""), 422, "unknown layer"),
        (("GET", "/maps", b""), 422, "required"),
        (("POST", "/fill", b"{}"), 404, "Not Found"),
        (("GET", "/samples/../app.py", b""), 404, "Not Found"),
        (("GET", "/samples/%2e%2e%2fapp.py", b""), 404, "Not Found"),
        (("GET", "/docs", b""), 404, "Not Found"),
        (("POST", "/predict", b"x" * (LIMIT + 1)), 413, "larger than 100,000 bytes"),
    ],
)
def test_wrong_requests(client: TestClient, call: tuple[str, str, bytes], status: int, words: str) -> None:
    method, path, content = call
    response = client.request(method, path, content=content)
    assert response.status_code == status and words in response.json()["detail"], response.text


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"x", "application/json", 415),
        (b"x", "multipart/form-data", 400),
        (b"x", "multipart/form-data; boundary=y", 400),
        (b'--y\r\nContent-Disposition: form-data; name="a"\r\n\r\nz\r\n--y--', "multipart/form-data; boundary=y", 422),
        (b"--y\r\nContent-Disposition: form-data\r\n\r\nz\r\n--y--\r\n", "multipart/form-data; boundary=y", 400),
    ],
)  # fmt: skip
def test_wrong_bodies(client: TestClient, content: bytes, kind: str, status: int) -> None:
    response = client.post("/predict", content=content, headers={"content-type": kind})
    assert response.status_code == status and response.json()["detail"]


def test_a_body_without_a_length_is_limited_too(client: TestClient) -> None:
    response = client.post("/predict", content=(b"x" * 10_000 for _ in range(20)))
    assert response.status_code == 413


def test_spoilt_pictures_never_break_it(client: TestClient) -> None:
    draw = random.Random(0)
    good = [encode(scene(), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")]
    for _ in range(300):
        data = bytearray(draw.choice(good))
        for _ in range(draw.randrange(1, 30)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        response = client.post("/predict", content=bytes(data[: draw.randrange(1, len(data) + 1)]))
        assert response.status_code in (200, 422), response.text


def test_a_busy_server_says_when_to_come_again(folder: Path) -> None:
    batcher = Batcher(capacity=3)
    with TestClient(application(open_service(folder), "busy", batcher)) as client:
        batcher.inside = 3
        response = client.post("/predict", content=encode(scene()))
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        assert client.get("/health").json() == {"status": "ok", "model": "busy", "in_flight": 3}
        batcher.inside = 0
        assert client.post("/predict", content=encode(scene())).status_code == 200
        batcher.drain()
        response = client.post("/predict", content=encode(scene()))
        assert response.status_code == 503 and response.headers["connection"] == "close"
        assert client.get("/health").status_code == 503


def test_an_answer_that_takes_too_long_is_504(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, batcher = open_service(folder), Batcher(timeout=0.05)

    def dawdle(shown: list[Any]) -> list[Any]:
        time.sleep(0.3)
        return [torch.ones(3) for _ in shown]

    monkeypatch.setattr(service, "classify", dawdle)
    with TestClient(application(service, "slow", batcher)) as client:
        response = client.post("/predict", content=encode(scene()))
        assert response.status_code == 504 and "within 0.05 s" in response.json()["detail"]


def test_a_mistake_of_ours_is_one_line_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = open_service(folder)

    def fail(shown: list[Any]) -> list[Any]:
        raise RuntimeError("secret")

    with TestClient(application(service, "failing"), raise_server_exceptions=False) as client:
        with monkeypatch.context() as patch:
            patch.setattr(service, "classify", fail)
            response = client.post("/predict", content=encode(scene()))
        assert (response.status_code, response.json()) == (500, {"detail": "the server made a mistake"})
        assert client.get("/health").json()["in_flight"] == 0


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=GIVES)
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Any]]:
    pytest.importorskip("tokenizers")
    folder = text_folder(tmp_path_factory.mktemp(request.param), request.param)
    with TestClient(application(open_service(folder), request.param)) as client:
        yield request.param, folder, client


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/fill", {"text": "the [MASK] sat on the [MASK] mat", "top": 4}),
    "causal": ("/generate", {"text": "one two", "tokens": 5, "temperature": 0, "seed": 1}),
    "classes": ("/classify", {"text": "the cat", "context": "a dog", "top": 4}),
    "span": ("/answer", {"text": "who sat on the mat", "context": "the cat sat on the red mat", "top": 4}),
    "translation": ("/translate", {"text": "the cat sat"}),
}


def told(gives: str, found: dict[str, Any]) -> Any:
    """An answer over HTTP as `predict_text` gives it."""
    if gives == "translation":
        return [[(found["text"], None)]]
    rows = found["masks"] if gives == "text" else [found["answers"]]
    return [[(one["name"], pytest.approx(one["probability"], abs=1e-5)) for one in row] for row in rows]


def test_text_is_answered_as_the_command_does(text: tuple[str, Path, TestClient]) -> None:
    gives, folder, client = text
    path, body = BODIES[gives]
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if gives == "causal":
        from allmlp.predict import generate

        assert response.json()["text"] == generate(folder, "one two", 5, 0.0, None, 1)
        return
    expected = predict_text(folder, body["text"], body.get("context", ""), body.get("top", 5))
    assert [[tuple(one) for one in row] for row in expected] == told(gives, response.json())


def test_text_in_batches_is_text_alone(text: tuple[str, Path, TestClient]) -> None:
    gives, _, client = text
    path, body = BODIES[gives]
    bodies = [{**body, "text": body["text"] + " four five six"[: 5 * number]} for number in range(4)] * 3
    alone = [client.post(path, json=one).json() for one in bodies]
    with ThreadPoolExecutor(12) as threads:
        together = [found.json() for found in threads.map(lambda one: client.post(path, json=one), bodies)]
    for one, other in zip(alone, together):
        if gives in ("causal", "translation"):
            assert one["text"] == other["text"]
        else:
            assert told(gives, one) == [[(name, chance.expected) for name, chance in row] for row in told(gives, other)]


def test_wrong_texts(text: tuple[str, Path, TestClient]) -> None:
    gives, _, client = text
    path, body = BODIES[gives]
    wrong: list[Any] = [
        {**body, "text": 5},
        {**body, "unknown": 1},
        {**body, "text": "x" * 5001},
        [],
        None,
        "text",
    ]
    if gives != "causal":
        wrong += [{}, {**body, "text": ""}, {**body, "text": " \n"}]
    if gives == "text":
        wrong += [{"text": "no gap"}, {"text": "one two three " * 10 + "[MASK]"}, {**body, "top": 0}]
    for one in wrong:
        response = client.post(path, json=one)
        assert response.status_code == 422 and list(response.json()) == ["detail"], (one, response.text)
    for raw in (b"", b"{", b"\xff\xfe", b"[" * 50_000, b'{"text": "\\ud800 [MASK]"}', b'{"text": NaN}'):
        response = client.post(path, content=raw, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400, 422), (raw[:20], response.text)
    assert client.post("/predict", content=b"x").status_code == 404


def test_odd_texts_are_survived(text: tuple[str, Path, TestClient]) -> None:
    gives, _, client = text
    path, body = BODIES[gives]
    for odd in ("\0", "[PAD] [CLS] [SEP] [UNK]", "😀 é ß \u202e", "a" * 5000, "\t.\n", "[MASK]" * 3, "\ud800"):
        for field in {"text", "context"} & set(body):
            raw = json.dumps({**body, field: odd})  # in ASCII: half a surrogate pair is not UTF-8
            response = client.post(path, content=raw, headers={"content-type": "application/json"})
            assert response.status_code in (200, 422), (odd[:9], response.text)


# --- what it says about itself ---------------------------------------------------------------------------------------


def test_the_description_fits_what_it_does(client: TestClient, text: tuple[str, Path, TestClient]) -> None:
    for served, expected in ((client, {"/predict", "/importance"}), (text[2], {BODIES[text[0]][0]})):
        described = served.get("/openapi.json").json()
        assert set(described["paths"]) == expected | {"/model", "/samples", "/maps", "/health", "/metrics"}
        for reference in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)):
            assert reference in described["components"]["schemas"]
        for path in expected:
            codes = set(described["paths"][path]["post"]["responses"])
            assert {"200", "408", "413", "422", "503", "504"} <= codes
            assert "Retry-After" in described["paths"][path]["post"]["responses"]["503"]["headers"]


def test_metrics_count_what_happened(folder: Path) -> None:
    with TestClient(application(open_service(folder), "counted")) as client:
        for data in (encode(scene()), encode(scene()), b"x"):
            client.post("/predict", content=data)
        client.get("/made-up/by/a/client")
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    values = {}
    for line in lines:
        if not line.startswith("# "):
            assert re.fullmatch(r'[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? [\d.e+-]+', line), line
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    assert values['allmlp_responses_total{path="/predict",status="200"}'] == 2
    assert values['allmlp_responses_total{path="/predict",status="422"}'] == 1
    assert values['allmlp_responses_total{path="other",status="404"}'] == 1
    assert values["allmlp_accepted_total"] == 3 and values["allmlp_in_flight"] == 0
    assert values['allmlp_batch_size_bucket{le="1"}'] == values["allmlp_batch_size_count"] == 2
    assert values['allmlp_response_seconds_bucket{path="/predict",le="+Inf"}'] == 3
    assert values["process_resident_memory_bytes"] > 10_000_000


def test_folders_that_cannot_be_served(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(allmlp.UserError, match=r"has no inputs\.json"):
        open_service(tmp_path)
    (tmp_path / "inputs.json").write_bytes((folder / "inputs.json").read_bytes())
    with pytest.raises(allmlp.UserError, match=r"it has no config\.json"):
        open_service(tmp_path)
