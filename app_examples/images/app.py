"""Thumbnails: three deployments decode, transform and encode an image.

    ingress run app_examples.images.app:app

    curl -F image=@photo.jpg 'http://127.0.0.1:8000/thumbnail?size=200' -o thumbnail.webp

http://127.0.0.1:8000/ is a page for uploads. `docs/how-to/images.md` has the rest.
"""

from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

from fastapi import FastAPI, HTTPException, Query, UploadFile
from fastapi.responses import HTMLResponse, Response
from PIL import Image, ImageOps, UnidentifiedImageError

import ingress as serve
from ingress.config import DeploymentOptions

MOST_BYTES = 10_000_000
MOST_PIXELS = 50_000_000
FORMATS = ("JPEG", "PNG", "WEBP")
PAGE = Path(__file__).with_name("page.html").read_text()

api = FastAPI(title="Images")

STAGE: DeploymentOptions = {"max_ongoing_requests": 2, "lanes": {"cpu": 2}}
"""Two images at once, each in a thread. The queue needs no limit: `Thumbnails` has one."""


@serve.deployment(**STAGE)
class Decode:
    @serve.method(lane="cpu")
    def __call__(self, data: bytes) -> Image.Image:
        """Return the image, upright and in RGB. Raises `HTTPException` if it is none."""
        try:
            image = Image.open(BytesIO(data), formats=FORMATS)
            if image.width * image.height > MOST_PIXELS:  # before the pixels are read
                raise HTTPException(413, f"more than {MOST_PIXELS:,} pixels")
            image.load()
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise HTTPException(422, f"not an image of {', '.join(FORMATS)}") from error
        return ImageOps.exif_transpose(image).convert("RGB")


@serve.deployment(**STAGE)
class Transform:
    @serve.method(lane="cpu")
    def __call__(self, image: Image.Image, size: int, grey: bool) -> Image.Image:
        small = ImageOps.contain(image, (size, size), Image.Resampling.LANCZOS)
        return ImageOps.grayscale(small) if grey else small


@serve.deployment(**STAGE)
class Encode:
    @serve.method(lane="cpu")
    def __call__(self, image: Image.Image, format: str) -> bytes:
        encoded = BytesIO()
        image.save(encoded, format, quality=80)
        return encoded.getvalue()


@serve.deployment(
    max_ongoing_requests=8,  # images in memory, in all stages together
    max_queued_requests=16,
    backpressure_config={"retry_after_s": 1},
)
@serve.ingress(api)
class Thumbnails:
    def __init__(
        self,
        decode: serve.DeploymentHandle,
        transform: serve.DeploymentHandle,
        encode: serve.DeploymentHandle,
    ) -> None:
        self.decode, self.transform, self.encode = decode, transform, encode

    @api.get("/", response_class=HTMLResponse)
    async def page(self) -> str:
        return PAGE

    @api.post("/thumbnail")
    async def thumbnail(
        self,
        image: UploadFile,
        size: Annotated[int, Query(ge=16, le=2000)] = 320,
        grey: bool = False,
        format: Literal["jpeg", "png", "webp"] = "webp",
    ) -> Response:
        """Return an image that fits into a square. The stages' results pass by reference."""
        data = await image.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise HTTPException(413, f"more than {MOST_BYTES:,} bytes")
        decoded = self.decode.remote(data)
        transformed = self.transform.remote(decoded, size, grey)
        encoded = await self.encode.remote(transformed, format)
        return Response(encoded, media_type=f"image/{format}")


app = Thumbnails.bind(Decode.bind(), Transform.bind(), Encode.bind())
