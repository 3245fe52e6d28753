"""`app_examples/images`: thumbnails, refusals and uploads, and docs/how-to/images.md."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

import ingress as serve
from tests.conformance.observe import Gate, Served, here, online
from tests.how_to import check_page
from tests.servers import bind, wait_until

pytest.importorskip("PIL", reason="needs the extra `apps`")

from PIL import Image

from app_examples.images import app as example


def encoded(size: tuple[int, int] = (400, 300), format: str = "JPEG", **options: Any) -> bytes:
    """Return an image that is red, and blue in its lower half."""
    image = Image.new("RGB", size, "red")
    image.paste("blue", (0, size[1] // 2, *size))
    data = BytesIO()
    image.save(data, format, **options)
    return data.getvalue()


def upload(it: Served, data: bytes, query: str = "") -> Any:
    return it.client.post(f"/thumbnail?{query}", files={"image": ("photo", data)})


def opened(response: Any) -> Image.Image:
    assert response.status_code == 200, response.text
    return Image.open(BytesIO(response.content))


@pytest.fixture
def it() -> Iterator[Served]:
    with online(example.app) as served:
        yield served


@pytest.mark.parametrize("format", ["jpeg", "png", "webp"])
def test_a_thumbnail_fits_the_square_and_keeps_its_proportions(format: str, it: Served) -> None:
    response = upload(it, encoded(format=format), f"size=100&format={format}")

    image = opened(response)
    assert (image.size, image.format) == ((100, 75), format.upper())
    assert response.headers["content-type"] == f"image/{format}"


def test_a_photo_of_a_camera_held_upright_is_turned(it: Served) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees, clockwise

    image = opened(upload(it, encoded(exif=exif), "size=100"))

    assert image.size == (75, 100)
    red, _, blue = image.convert("RGB").getpixel((10, 50))  # type: ignore[misc]
    assert blue > red


def test_a_grey_thumbnail_has_no_colour(it: Served) -> None:
    image = opened(upload(it, encoded(), "size=100&grey=true&format=png"))

    assert image.mode == "L"


@pytest.mark.parametrize(
    ("data", "query", "status", "detail"),
    [
        (b"no image", "", 422, "not an image of JPEG, PNG, WEBP"),
        (b"", "", 422, "not an image of JPEG, PNG, WEBP"),
        (encoded()[:-200], "", 422, "not an image of JPEG, PNG, WEBP"),
        (encoded(format="BMP"), "", 422, "not an image of JPEG, PNG, WEBP"),
        (encoded((8000, 7000), "PNG"), "", 413, "more than 50,000,000 pixels"),
        (bytes(example.MOST_BYTES + 1), "", 413, "more than 10,000,000 bytes"),
        (encoded(), "size=5", 422, None),
        (encoded(), "format=bmp", 422, None),
    ],
    ids=["text", "nothing", "cut", "bmp", "pixels", "bytes", "size", "format"],
)
def test_an_upload_that_is_no_such_image_is_refused(
    data: bytes, query: str, status: int, detail: str | None, it: Served
) -> None:
    response = upload(it, data, query)

    assert response.status_code == status
    assert detail in (None, response.json()["detail"])


def test_the_page_has_a_form_for_uploads(it: Served) -> None:
    response = it.get("/")

    assert response.headers["content-type"].startswith("text/html")
    assert '<input type="file" name="image"' in response.text


def test_images_beyond_the_queue_are_refused_before_a_stage_works_on_them() -> None:
    gate = Gate()
    places = []

    class Decode(example.Decode.func_or_class):  # type: ignore[misc, name-defined]
        @serve.method(lane="cpu")
        def __call__(self, data: bytes) -> Any:
            places.append(here())
            gate.wait()
            return super().__call__(data)

    deployment: Any = example.Decode
    stages = (
        bind(replace(deployment, func_or_class=Decode)),
        *(bind(each) for each in (example.Transform, example.Encode)),
    )
    with online(bind(example.Thumbnails, *stages)) as it, ThreadPoolExecutor(24) as pool:
        waiting = [pool.submit(upload, it, encoded()) for _ in range(8 + 16)]
        wait_until(lambda: it.status().queued == 16)
        wait_until(lambda: it.status("Decode").queued == 6)
        refused = upload(it, encoded())
        gate.open()
        answers = [each.result() for each in waiting]

    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert {answer.status_code for answer in answers} == {200}
    assert len(places) == 24
    assert all("cpu" in place for place in places)


@pytest.mark.thorough
def test_its_page_shows_its_code_and_its_answers(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(encoded((1600, 1200)))
    check_page("images", tmp_path)
