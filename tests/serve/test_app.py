"""The HTTP API returns what the library returns; every error is one line and never an unhandled 500."""

from __future__ import annotations

import base64
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

pytest.importorskip("fastapi")
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import allmlp
from allmlp.analysis.attention_maps import attention_maps
from allmlp.analysis.saliency import occlusion
from allmlp.data.preprocessing import ImagePreprocessing, read_preprocessing, write_preprocessing
from allmlp.data.tokenizer import load_tokenizer
from allmlp.layers import Attention, ClassifierHead, MeanPool
from allmlp.models.gmlp import gmlp_text
from allmlp.serve.app import create_app, load_service
from allmlp.serve.batching import Batcher
from allmlp.serve.images import OCCLUSION_SQUARES, ImageService
from allmlp.serve.limits import SECURITY_HEADERS, RequestLimits, client_of
from allmlp.serve.page import page_files, samples
from allmlp.serve.schema import MAX_INPUTS
from allmlp.weights.bundled import bundled
from data.sample_images import CORRUPT, encode, scene
from folders import CLASSES, TASKS, image_folder, text_folder

LIMIT = 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(create_app({"small": load_service(folder)}, limits=RequestLimits(max_body=LIMIT))) as made:
        yield made


# --- images ----------------------------------------------------------------------------------------------------------


def predictions(response: Any) -> list[tuple[str, float]]:
    assert response.status_code == 200, response.text
    return [(found["label"], found["probability"]) for found in response.json()["predictions"]]


def test_an_answer_is_a_number_or_an_error(folder: Path) -> None:
    service = load_service(folder)
    assert isinstance(service, ImageService)
    kept = service.classify

    def diverge(images: list[Tensor]) -> Tensor:
        return torch.stack([kept([x])[0] * (torch.nan if x.float().mean() > 128 else 1) for x in images])

    service.classify = diverge
    white, black = (encode(Image.new("RGB", (12, 8), shade)) for shade in ("white", "black"))
    with TestClient(create_app({"small": service})) as made:
        response = made.post("/predict", content=white)
        assert response.status_code == 422 and "for this input is NaN" in response.json()["detail"]
        both = made.post("/predict", files=[("files", ("a", white)), ("files", ("b", black))]).json()["results"]
        assert "NaN" in both[0]["error"] and both[1]["predictions"] and "error" not in both[1]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_image_predictions_match_the_command(client: TestClient, folder: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "image"
    file.write_bytes(encode(scene(50, 30), kind))
    (expected,) = allmlp.predict(folder, [file], top_k=2)
    data = file.read_bytes()
    responses = [
        client.post("/predict?top_k=2", content=data, headers={"content-type": f"image/{kind.lower()}"}),
        client.post("/predict?top_k=2", content=data, headers={"content-type": "application/octet-stream"}),
        client.post("/predict?top_k=2", content=data, headers={"content-type": "application/x-www-form-urlencoded"}),
        client.post("/predict?top_k=2", files={"file": ("../../etc/passwd", data)}, data={"more": "fields"}),
    ]
    for response in responses:
        assert predictions(response) == [
            (name, pytest.approx(probability, abs=1e-6)) for name, probability, _ in expected
        ]
        timing = response.json()["timing"]
        assert timing["batch_size"] == 1 and timing["model_ms"] > 0 and timing["decode_ms"] > 0


def test_batching_does_not_change_predictions(client: TestClient) -> None:
    images = [encode(scene(40, 30, seed)) for seed in range(12)]
    alone = [predictions(client.post("/predict", content=data)) for data in images]
    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(lambda data: predictions(client.post("/predict", content=data)), images))
    for one, other in zip(alone, together):
        assert [name for name, _ in one] == [name for name, _ in other]
        assert [chance for _, chance in one] == pytest.approx([chance for _, chance in other], abs=1e-5)


def test_importance_is_occlusion(client: TestClient, folder: Path) -> None:
    data = encode(scene(12, 8))
    service = load_service(folder)
    image = service.predictor.collate([service.decode(data)])[0]  # type: ignore[union-attr]
    for name in CLASSES:
        expected = occlusion(allmlp.load(folder), image, CLASSES.index(name), OCCLUSION_SQUARES)
        found = client.post(f"/importance?label={name}", content=data).json()
        assert found["label"] == name
        assert torch.tensor(found["importance"]) == pytest.approx(expected.numpy(), abs=1e-3)
    best = predictions(client.post("/predict", content=data))[0]
    found = client.post("/importance", content=data).json()
    assert (found["label"], found["probability"]) == (best[0], pytest.approx(best[1], abs=1e-6))


def test_maps_are_the_quantized_weights(client: TestClient, folder: Path) -> None:
    model = allmlp.load(folder)
    layers = client.get("/model").json()["layers"]
    assert [layer["name"] for layer in layers] == [f"blocks.{number}.channel.mix.inner.proj" for number in (0, 1)]
    for layer in layers:
        found = client.get("/maps", params={"layer": layer["name"]}).json()
        assert (found["count"], found["height"], found["width"]) == (6, 2, 3)
        values = np.frombuffer(base64.b64decode(found["data"]), np.int8).reshape(6, 6) * found["scale"]
        weight = model.get_parameter(f"{layer['name']}.weight").detach().numpy()
        assert found["scale"] == pytest.approx(abs(weight).max() / 127, rel=1e-6)
        assert values == pytest.approx(weight, abs=0.501 * found["scale"])


def test_grayscale_mixer(tmp_path: Path) -> None:
    with TestClient(create_app({"gray": load_service(image_folder(tmp_path, channels=1, mixer=True))})) as client:
        assert len(predictions(client.post("/predict", content=encode(scene())))) == 3
        (first, _) = client.get("/model").json()["layers"]
        found = client.get("/maps", params={"layer": first["name"]}).json()
        assert (found["kind"], found["count"], found["height"], found["width"]) == ("units", 10, 2, 3)


def heads(found: dict[str, Any]) -> Tensor:
    """The maps of a response, n h w."""
    values = np.frombuffer(base64.b64decode(found["data"]), np.int8).reshape(
        found["count"], found["height"], found["width"]
    )
    return torch.tensor(values * found["scale"], dtype=torch.float32)


def test_attention_to_an_image(tmp_path: Path) -> None:
    folder, data = image_folder(tmp_path / "vit", token=Attention(4)), encode(scene(12, 8))
    service = load_service(folder)
    with TestClient(create_app({"vit": service})) as client:
        layers = client.get("/model").json()["layers"]
        assert [(layer["kind"], layer["count"]) for layer in layers] == [("attention", 4)] * 2
        found = client.post("/attention", params={"layer": layers[1]["name"]}, content=data).json()
        assert client.post("/attention?layer=x", content=data).status_code == 422
    image = service.predictor.collate([service.decode(data)])  # type: ignore[union-attr]
    expected = attention_maps(allmlp.load(folder), image)[1].weights[0].mean(1)  # the output is the mean of all patches
    assert torch.allclose(heads(found).flatten(1), expected, atol=0.501 * found["scale"] + 1e-6)
    assert (found["height"], found["width"], found["row_tokens"]) == (2, 3, [])


def test_attention_of_a_translation(tmp_path: Path) -> None:
    with TestClient(create_app({"translator": load_service(text_folder(tmp_path, "translation"))})) as client:
        layer = next(one for one in client.get("/model").json()["layers"] if one["kind"] == "attention")
        found = client.post("/attention", params={"layer": layer["name"]}, json={"text": "the cat sat"}).json()
        assert client.post("/attention", params={"layer": layer["name"]}, json={"text": " "}).status_code == 422
    assert found["column_tokens"] == ["the", "cat", "sat", "[SEP]"] and found["row_tokens"][-1] == "[SEP]"
    maps = heads(found)
    assert maps.shape == (2, len(found["row_tokens"]), 4)
    assert torch.allclose(maps.sum(2), torch.ones(maps.shape[:2]), atol=4 * found["scale"])


def test_page_and_samples(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    links = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert links and not any("//" in link for link in links)
    for link in links:
        assert client.get(f"/{link}").status_code == 200, link
    samples = client.get("/samples").json()["images"]
    assert {sample["label"] for sample in samples} == set(CLASSES)
    for sample in samples:
        assert predictions(client.post("/predict", content=client.get(sample["url"]).content))


def test_samples_match_the_class_names() -> None:
    pages = page_files()

    def labels(*class_names: str) -> set[str]:
        return {sample.label for sample in samples(pages, "predict", class_names).images}

    assert labels(*map(str, range(10))) == {"0", "2", "3", "5", "7", "8"}
    assert labels("frog", "prince") == {"frog"}
    assert len(labels("prince")) == len([path for path in pages if path.startswith("/samples/")])
    assert not samples(pages, "fill", ()).images and samples(pages, "fill", ()).texts


def test_bundled_model_classifies_its_samples() -> None:
    service = load_service(bundled())
    assert isinstance(service, ImageService)
    found = samples(pages := page_files(), "predict", service.class_names).images
    assert {sample.label for sample in found} == set(service.class_names)
    for sample in found:
        (probabilities,) = service.classify([service.decode(bytes(pages[sample.url].body))])
        assert service.class_names[int(probabilities.argmax())] == sample.label and probabilities.max() > 0.6


# --- many images, several models --------------------------------------------------------------------------------------


def test_many_images_in_one_request(client: TestClient) -> None:
    images = [encode(scene(40, 30, seed)) for seed in range(5)]
    alone = [predictions(client.post("/predict?top_k=2", content=data)) for data in images]
    files = [("files", (f"{number}.png", data)) for number, data in enumerate([*images[:3], b"broken", *images[3:]])]
    response = client.post("/predict?top_k=2", files=files)
    assert response.status_code == 200, response.text
    found = response.json()["results"]
    assert [one["name"] for one in found] == [f"{number}.png" for number in range(6)]
    wrong = found.pop(3)
    assert wrong.keys() == {"name", "error"} and "not an image" in wrong["error"]
    for one, expected in zip(found, alone, strict=True):
        assert [(row["label"], pytest.approx(row["probability"], abs=1e-5)) for row in one["predictions"]] == expected
    assert client.post("/predict", files=files[:1]).json()["results"][0]["name"] == "0.png"
    assert "results" in client.post("/predict", files=[("a", images[0]), ("b", images[1])]).json()
    assert "predictions" in client.post("/predict", files=[("file", images[0])]).json()


def test_number_of_images_in_a_request_is_limited(client: TestClient, folder: Path) -> None:
    data = encode(scene(8, 8))
    assert len(client.post("/predict", files=[("files", data)] * MAX_INPUTS).json()["results"]) == MAX_INPUTS
    response = client.post("/predict", files=[("files", data)] * (MAX_INPUTS + 1))
    assert response.status_code == 400 and "Too many files" in response.json()["detail"]
    assert client.post("/importance", files=[("files", data)] * 2).status_code == 400
    batcher = Batcher(max_concurrency=3)
    with TestClient(create_app({"small": load_service(folder)}, batcher)) as few:
        assert few.get("/model").json()["max_inputs"] == 3
        assert few.post("/predict", files=[("files", data)] * 3).status_code == 200
        assert few.post("/predict", files=[("files", data)] * 4).status_code == 400
        batcher.in_flight = 1
        assert few.post("/predict", files=[("files", data)] * 3).status_code == 503
        batcher.in_flight = 0
        assert few.post("/predict", files=[("files", data)] * 2).status_code == 200
    assert batcher.accepted == 5 and batcher.in_flight == 0


def test_several_models(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    gray, words = image_folder(tmp_path / "gray", 1, True), text_folder(tmp_path / "words", "classes")
    with TestClient(create_app({one.name: load_service(one) for one in (folder, gray, words)})) as client:
        models = client.get("/models").json()
        assert [one["name"] for one in models] == [folder.name, "gray", "words"]
        assert [one["endpoint"] for one in models] == ["predict", "predict", "classify"]
        data = encode(scene())
        first = predictions(client.post("/predict", content=data))
        assert predictions(client.post(f"/{models[0]['path']}/predict", content=data)) == first
        other = predictions(client.post("/models/gray/predict", content=data))
        (expected,) = allmlp.predict(gray, [write(tmp_path / "image.png", data)])
        assert other == [(name, pytest.approx(probability, abs=1e-5)) for name, probability, _ in expected] != first
        assert client.post("/models/words/classify", json={"text": "the cat"}).status_code == 200
        assert client.get("/models/gray/model").json() == models[1]
        assert client.post("/models/words/predict", content=data).status_code == 404
        assert client.post("/models/none/predict", content=data).status_code == 404
        assert 'path="/models/gray/predict",status="200"' in client.get("/metrics").text


def write(file: Path, data: bytes) -> Path:
    file.write_bytes(data)
    return file


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://testserver"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": "TestServer:8000"}, 200),
        ({f"x-{number}": "y" for number in range(120)}, 431),
        ({"x": "y" * 40_000}, 431),
    ],
)
def test_requests_of_other_sites_are_refused(folder: Path, headers: dict[str, str], status: int) -> None:
    app = create_app({"small": load_service(folder)}, hosts=frozenset({"testserver"}))
    with TestClient(app) as client:
        response = client.post("/predict", content=encode(scene()), headers=headers)
        assert response.status_code == status, response.text
        assert SECURITY_HEADERS.items() <= dict(response.headers).items()
        assert status == 200 or response.headers["connection"] == "close"


def test_allowed_origins(folder: Path) -> None:
    """Pages of these sites may send requests and read the responses."""
    good, evil = {"origin": "https://example.org"}, {"origin": "https://evil.example"}
    cross = {"sec-fetch-site": "cross-site"}
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with TestClient(create_app({"small": load_service(folder)}, origins=["https://example.org"])) as client:
        response = client.post("/predict", content=encode(scene()), headers=good | cross)
        assert response.status_code == 200 and response.headers["access-control-allow-origin"] == good["origin"]
        assert client.options("/predict", headers=good | preflight).status_code == 200
        assert client.options("/predict", headers=evil | preflight).status_code == 400
        assert client.post("/predict", content=encode(scene()), headers=evil).status_code == 403
    with TestClient(create_app({"small": load_service(folder)}, origins=["*"])) as client:
        assert client.post("/predict", content=encode(scene()), headers=evil | cross).status_code == 200


@pytest.mark.parametrize("path", ["/", "/page.js", "/health", "/openapi.json", "/metrics", "/none", "/predict"])
def test_security_headers(client: TestClient, path: str) -> None:
    assert SECURITY_HEADERS.items() <= dict(client.get(path).headers).items()


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8::1:2", "2001:db8::/64"),
        ("not:one", "not:one"),
        ("unknown", "unknown"),
        ("x" * 1000, "x" * 64),
    ],
)
def test_clients_by_address(address: str, client: str) -> None:
    assert client_of(address) == client


def test_head_requests(client: TestClient) -> None:
    for path in ("/", "/health", "/page.js", "/model"):
        assert client.head(path).status_code == 200


def test_large_images_do_not_delay_small_ones(folder: Path) -> None:
    """Images with many pixels are decoded in threads of their own, and refused once they would wait too long."""
    service = load_service(folder)
    assert isinstance(service, ImageService)
    small, large, long = (encode(Image.new("RGB", size)) for size in ((30, 20), (2300, 1900), (2**16 + 1, 1)))
    assert (service.measure(small), service.measure(large), service.measure(b"x")) == (600, 4_370_000, 0)
    begun, go, decode = threading.Event(), threading.Event(), service.predictor.decode

    def slow(data: bytes) -> Any:
        if data == large:
            begun.set()
            assert go.wait(20)
        return decode(data)

    service.predictor.decode = slow  # type: ignore[method-assign]
    batcher = Batcher(timeout=9.0)
    with TestClient(create_app({"small": service}, batcher)) as client, ThreadPoolExecutor(2) as threads:
        assert "on a side" in client.post("/predict", content=long).json()["detail"]
        first = threads.submit(client.post, "/predict", content=large)
        assert begun.wait(10) and batcher.pixels.total() == 4_370_000
        assert client.post("/predict", content=small).status_code == 200
        batcher.seconds_per_pixel = 1e-6
        second = client.post("/predict", content=large)
        assert second.status_code == 503 and int(second.headers["retry-after"]) >= 1
        go.set()
        assert first.result().status_code == 200 and batcher.pixels.total() == 0 < batcher.seconds_per_pixel != 1e-6


@pytest.mark.parametrize("path", ["/predict", "/importance"])
@pytest.mark.parametrize("fault", CORRUPT)
def test_broken_images(client: TestClient, path: str, fault: str) -> None:
    response = client.post(path, content=CORRUPT[fault])
    assert response.status_code == 422 and list(response.json()) == ["detail"], response.text


@pytest.mark.parametrize(
    ("call", "status", "words"),
    [
        (("POST", "/predict?top_k=0", b"x"), 422, "top_k: Input should be greater"),
        (("POST", "/predict?top_k=x", b"x"), 422, "valid integer"),
        (("POST", "/importance?label=dgo", b"x"), 422, "did you mean 'dog'?"),
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
def test_invalid_requests(client: TestClient, call: tuple[str, str, bytes], status: int, words: str) -> None:
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
def test_invalid_bodies(client: TestClient, content: bytes, kind: str, status: int) -> None:
    response = client.post("/predict", content=content, headers={"content-type": kind})
    assert response.status_code == status and response.json()["detail"]


def test_chunked_body_is_limited(client: TestClient) -> None:
    response = client.post("/predict", content=(b"x" * 10_000 for _ in range(20)))
    assert response.status_code == 413


def test_buffered_bodies_are_limited_and_released(folder: Path) -> None:
    data, limits = encode(scene()), RequestLimits(max_buffered=2000)
    assert len(data) < limits.max_buffered < 20 * len(data)
    with TestClient(create_app({"buffered": load_service(folder)}, limits=limits)) as client:
        for _ in range(20):
            assert client.post("/predict", content=data).status_code == 200
            assert client.post("/predict", content=b"x" * len(data)).status_code == 422
        response = client.post("/predict", content=b"x" * (limits.max_buffered + 1))
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert client.post("/predict", content=data).status_code == 200


@pytest.mark.slow
def test_corrupted_images_never_fail_with_500(client: TestClient) -> None:
    draw = random.Random(0)
    good = [encode(scene(), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")]
    for _ in range(300):
        data = bytearray(draw.choice(good))
        for _ in range(draw.randrange(1, 30)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        response = client.post("/predict", content=bytes(data[: draw.randrange(1, len(data) + 1)]))
        assert response.status_code in (200, 422), response.text


def test_busy_server_sends_retry_after(folder: Path) -> None:
    batcher = Batcher(max_concurrency=3)
    with TestClient(create_app({"busy": load_service(folder)}, batcher)) as client:
        batcher.in_flight = 3
        response = client.post("/predict", content=encode(scene()))
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        assert client.get("/health").json() == {"status": "ok", "models": ["busy"], "in_flight": 3}
        batcher.in_flight = 0
        assert client.post("/predict", content=encode(scene())).status_code == 200
        batcher.drain()
        response = client.post("/predict", content=encode(scene()))
        assert response.status_code == 503 and response.headers["connection"] == "close"
        assert client.get("/health").status_code == 503


def test_timeout_is_504(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, batcher = load_service(folder), Batcher(timeout=0.05)

    def slow(inputs: list[Any]) -> list[Any]:
        time.sleep(0.3)
        return [torch.ones(3) for _ in inputs]

    monkeypatch.setattr(service, "classify", slow)
    with TestClient(create_app({"slow": service}, batcher)) as client:
        response = client.post("/predict", content=encode(scene()))
        assert response.status_code == 504 and "within 0.05 s" in response.json()["detail"]


def test_internal_error_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = load_service(folder)

    def fail(inputs: list[Any]) -> list[Any]:
        raise RuntimeError("secret")

    with TestClient(create_app({"failing": service}), raise_server_exceptions=False) as client:
        with monkeypatch.context() as patch:
            patch.setattr(service, "classify", fail)
            response = client.post("/predict", content=encode(scene()))
        assert (response.status_code, response.json()) == (500, {"detail": "internal server error"})
        assert client.get("/health").json()["in_flight"] == 0


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=TASKS)
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Any]]:
    pytest.importorskip("tokenizers")
    folder = text_folder(tmp_path_factory.mktemp(request.param), request.param)
    with TestClient(create_app({request.param: load_service(folder)})) as client:
        yield request.param, folder, client


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/fill", {"text": "the [MASK] sat on the [MASK] mat", "top_k": 4}),
    "causal": ("/generate", {"prompt": "one two", "max_new_tokens": 5, "temperature": 0, "seed": 1}),
    "classes": ("/classify", {"text": "the cat", "text_pair": "a dog", "top_k": 4}),
    "span": ("/answer", {"question": "who sat on the mat", "context": "the cat sat on the red mat", "top_k": 4}),
    "translation": ("/translate", {"text": "the cat sat"}),
}


FIELDS = {"causal": "prompt", "span": "question"}
"""The name of the text in a request, if it is not `text`."""
SECOND = {"classes": "text_pair", "span": "context"}


def as_predicted(task: str, found: dict[str, Any]) -> Any:
    """A response in the form of `allmlp.predict`."""
    if task == "translation":
        return [[(found["text"], None)]]
    key = {"text": "token", "classes": "label", "span": "answer"}[task]
    rows = found["predictions"] if task == "text" else [found["answers" if task == "span" else "predictions"]]
    return [[(one[key], pytest.approx(one["probability"], abs=1e-5)) for one in row] for row in rows]


def test_text_predictions_match_the_command(text: tuple[str, Path, TestClient]) -> None:
    task, folder, client = text
    path, body = BODIES[task]
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if task == "causal":
        from allmlp.prediction import generate

        assert response.json()["text"] == "".join(generate(folder, "one two", 5, 0.0, seed=1))
        return
    context = body.get(SECOND.get(task, ""), "")
    expected = allmlp.predict(folder, body[FIELDS.get(task, "text")], context=context, top_k=body.get("top_k", 5))
    assert [[tuple(one[:2]) for one in row] for row in expected] == as_predicted(task, response.json())


def test_bodies_that_are_not_json(text: tuple[str, Path, TestClient]) -> None:
    """curl -d sends a form, unless it is told otherwise; and text that is cut short."""
    task, _, client = text
    path, body = BODIES[task]
    response = client.post(
        path, content=json.dumps(body), headers={"content-type": "application/x-www-form-urlencoded"}
    )
    assert response.status_code == 422 and "Content-Type: application/json" in response.json()["detail"]
    response = client.post(path, content='{"text": ', headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert response.json()["detail"] == "the body is not valid JSON at character 9: Expecting value"


def test_batching_does_not_change_text_predictions(text: tuple[str, Path, TestClient]) -> None:
    task, _, client = text
    path, body = BODIES[task]
    field = FIELDS.get(task, "text")
    bodies = [{**body, field: body[field] + " four five six"[: 5 * number]} for number in range(4)] * 3
    alone = [client.post(path, json=one).json() for one in bodies]
    with ThreadPoolExecutor(12) as threads:
        together = [found.json() for found in threads.map(lambda one: client.post(path, json=one), bodies)]
    for one, other in zip(alone, together):
        if task in ("causal", "translation"):
            assert one["text"] == other["text"]
        else:
            expected = [[(name, chance.expected) for name, chance in row] for row in as_predicted(task, other)]
            assert as_predicted(task, one) == expected


def test_many_texts_in_one_request(text: tuple[str, Path, TestClient]) -> None:
    task, _, client = text
    path, body = BODIES[task]
    if task in ("causal", "span"):
        assert client.post(path, json={"texts": ["a"]}).status_code == 422
        return
    texts = [body["text"] + end for end in ("", " four", " five six")]
    alone = [
        client.post(path, json={"text": one, "top_k": 2} if task != "translation" else {"text": one}) for one in texts
    ]
    options: dict[str, Any] = {} if task == "translation" else {"top_k": 2}
    response = client.post(path, json={"texts": texts, **options})
    assert response.status_code == 200, response.text
    for one, expected in zip(response.json()["results"], alone, strict=True):
        key = "text" if task == "translation" else "predictions"
        if task == "translation":
            assert one == {key: expected.json()[key]}
        else:
            names = [[row[0] for row in rows] for rows in as_predicted(task, one)]
            assert names == [[row[0] for row in rows] for rows in as_predicted(task, expected.json())]
    if task == "text":
        mixed = client.post(path, json={"texts": [texts[0], "no mask"]}).json()["results"]
        assert "predictions" in mixed[0] and mixed[1] == {"error": "the text has no [MASK] to fill in"}
    for wrong in ([], ["a"] * (MAX_INPUTS + 1), "a", [" "], [5]):
        response = client.post(path, json={"texts": wrong})
        assert response.status_code == 422 and "one." not in response.json()["detail"], response.text
    if task == "classes":
        assert client.post(path, json={"texts": ["a", "b"], "text_pairs": ["c"]}).status_code == 422
        pair = client.post(path, json={"texts": ["a"], "text_pairs": ["dog"]}).json()["results"][0]["predictions"]
        assert pair == client.post(path, json={"text": "a", "text_pair": "dog"}).json()["predictions"]
        assert client.post(path, json={"text": "a", "top_k": 2.0}).status_code == 200
        assert client.post(path, json={"text": " "}).json() == {"detail": "text: the text is empty"}


def test_invalid_texts(text: tuple[str, Path, TestClient]) -> None:
    task, _, client = text
    path, body = BODIES[task]
    field = FIELDS.get(task, "text")
    invalid: list[Any] = [{**body, field: 5}, {**body, "unknown": 1}, {**body, field: "x" * 5001}, [], None, "text"]
    if task != "causal":
        invalid += [{}, {**body, field: ""}, {**body, field: " \n"}]
    if task == "text":
        invalid += [{"text": "no mask"}, {"text": "one two three " * 10 + "[MASK]"}, {**body, "top_k": 0}]
    for one in invalid:
        response = client.post(path, json=one)
        assert response.status_code == 422 and list(response.json()) == ["detail"], (one, response.text)
    for raw in (b"", b"{", b"\xff\xfe", b"[" * 50_000, b'{"text": "\\ud800 [MASK]"}', b'{"text": NaN}'):
        response = client.post(path, content=raw, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400, 422), (raw[:20], response.text)
    assert client.post("/predict", content=b"x").status_code == 404


def test_causal_model_that_classifies(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "model", "classes")
    causal = gmlp_text(2, 16, 32, seq_len=24, vocab_size=len(load_tokenizer(folder)), causal=True)
    allmlp.save(allmlp.create(causal.replace(pool=MeanPool(), head=ClassifierHead(len(CLASSES)))), folder)
    body = {"text": "one two", "text_pair": "three"}
    with TestClient(create_app({"model": load_service(folder)})) as client:
        found = client.post("/classify", json=body).json()["predictions"]
    assert sorted(one["label"] for one in found) == sorted(CLASSES)


def test_a_classifier_of_pairs_warns_of_single_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = text_folder(tmp_path / "model", "classes")
    write_preprocessing(folder, read_preprocessing(folder).replace(text_columns=("premise", "hypothesis")))
    with TestClient(create_app({"model": load_service(folder)})) as client:
        # The page called the second text optional, and its samples were single texts.
        assert client.get("/model").json()["text_columns"] == ["premise", "hypothesis"]
        assert all(sample["text_pair"] for sample in client.get("/samples").json()["texts"])
        assert client.post("/classify", json={"text": "one", "text_pair": "two"}).status_code == 200
        assert "trained on pairs" not in caplog.text
        assert client.post("/classify", json={"text": "one"}).status_code == 200
        assert "over HTTP as text_pair" in caplog.text


def test_settings_of_generate(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with TestClient(create_app({"causal": load_service(text_folder(tmp_path, "causal"))})) as client:
        for settings, status in (
            ({"top_k": None, "top_p": None, "seed": None}, 200),
            ({"top_k": 3.0, "seed": 5.0, "max_new_tokens": 2.0}, 200),
            ({"top_k": 0}, 422),
            ({"top_k": 10**30}, 200),
            ({"seed": -1}, 422),
            ({"seed": 10**22}, 422),
            ({"top_p": 0}, 422),
            ({"top_p": 1e-300}, 200),
            ({"temperature": 1e-300}, 422),
            ({"temperature": 11}, 422),
        ):
            response = client.post("/generate", json={"prompt": "one", "max_new_tokens": 2} | settings)
            assert response.status_code == status, (settings, response.text)


def test_unusual_texts_never_fail_with_500(text: tuple[str, Path, TestClient]) -> None:
    task, _, client = text
    path, body = BODIES[task]
    for odd in ("\0", "[PAD] [CLS] [SEP] [UNK]", "😀 é ß \u202e", "a" * 5000, "\t.\n", "[MASK]" * 3, "\ud800"):
        for field in {FIELDS.get(task, "text"), SECOND.get(task, "")} & set(body):
            raw = json.dumps({**body, field: odd})  # in ASCII: a lone surrogate is not UTF-8
            response = client.post(path, content=raw, headers={"content-type": "application/json"})
            assert response.status_code in (200, 422), (odd[:9], response.text)


# --- OpenAPI and metrics ---------------------------------------------------------------------------------------------


def test_openapi_describes_the_endpoints(client: TestClient, text: tuple[str, Path, TestClient]) -> None:
    of_text = {BODIES[text[0]][0], *(["/attention"] if text[0] == "translation" else [])}
    for served, expected in ((client, {"/predict", "/importance"}), (text[2], of_text)):
        described = served.get("/openapi.json").json()
        (name,) = served.get("/health").json()["models"]
        of_model = expected | {"/model", "/samples", "/maps"}
        named = {f"/models/{name}{path}" for path in of_model}
        assert set(described["paths"]) == of_model | named | {"/models", "/health", "/metrics"}
        for reference in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)):
            assert reference in described["components"]["schemas"]
        for path in expected:
            codes = set(described["paths"][path]["post"]["responses"])
            assert {"200", "408", "413", "422", "503", "504"} <= codes
            assert "Retry-After" in described["paths"][path]["post"]["responses"]["503"]["headers"]


def test_metrics(folder: Path) -> None:
    with TestClient(create_app({"counted": load_service(folder)})) as client:
        for data in (encode(scene()), encode(scene()), b"x"):
            client.post("/predict", content=data)
        client.get("/made-up/by/a/client")
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert values["http_requests_total", "/predict", "200"] == 2
    assert values["http_requests_total", "/predict", "422"] == 1
    assert values["http_requests_total", "other", "404"] == 1
    assert values["allmlp_requests_accepted_total",] == 3
    assert values["allmlp_requests_in_flight",] == 0 and values["allmlp_max_concurrency",] == 128
    assert values["allmlp_batch_size_bucket", "1.0"] == values["allmlp_batch_size_count",] == 2
    assert values["allmlp_batch_size_sum",] == values["allmlp_batch_duration_seconds_count",] == 2
    assert values["allmlp_batch_duration_seconds_sum",] > 0
    assert values["http_request_duration_seconds_count", "/predict"] == 3
    assert values["http_request_duration_seconds_sum", "/predict"] > 0
    assert values["process_resident_memory_bytes",] > 10_000_000


def test_metrics_of_two_applications_are_separate(folder: Path) -> None:
    with (
        TestClient(create_app({"one": load_service(folder)})) as one,
        TestClient(create_app({"two": load_service(folder)})) as two,
    ):
        one.post("/predict", content=encode(scene()))
        assert 'path="/predict"' in one.get("/metrics").text
        assert 'path="/predict"' not in two.get("/metrics").text


def test_invalid_folders(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(allmlp.UserError, match=r"is not a model folder"):
        load_service(tmp_path)
    (tmp_path / "preprocessing.json").write_bytes((folder / "preprocessing.json").read_bytes())
    with pytest.raises(allmlp.UserError, match=r"it has no config\.json"):
        load_service(tmp_path)


def test_regression_model_is_rejected(tmp_path: Path) -> None:
    write_preprocessing(image_folder(tmp_path), ImagePreprocessing((0.4,) * 3, (0.2,) * 3, task="values"))
    with pytest.raises(allmlp.UserError, match="is not a classifier"):
        load_service(tmp_path)


@pytest.mark.parametrize("kind", ["image", "text"])
def test_heads_that_do_not_classify_are_rejected(tmp_path: Path, kind: str) -> None:
    folder = image_folder(tmp_path) if kind == "image" else text_folder(tmp_path, "classes")
    known = read_preprocessing(folder)
    allmlp.save(allmlp.load(folder, num_classes=1), folder)
    with pytest.raises(allmlp.UserError, match="has a single output, so it is not a classifier"):
        load_service(folder)
    allmlp.save(allmlp.load(folder, num_classes=4), folder)
    write_preprocessing(folder, known)
    with pytest.raises(allmlp.UserError, match="has 4 outputs, but 3 class names"):
        load_service(folder)


def test_model_info_names_fields_as_the_preprocessing(client: TestClient, folder: Path) -> None:
    info = client.get("/model").json()
    written = json.loads((folder / "preprocessing.json").read_text())
    assert {name: info[name] for name in ("class_names", "crop_pct")} == {
        name: written[name] for name in ("class_names", "crop_pct")
    }
    assert info["img_size"] == [8, 12] and info["grid_size"] == [2, 3]
