"""Folders of images as calibration samples, prepared as the model was trained: resized, cropped, scaled, laid out."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from pipeline.calibration.samples import Sample
from pipeline.calibration.subject import CalibrationModel
from pipeline.compare.inputs import InputSpec
from plugins.errors import KilnError, first_line, first_problem

SPEC_FILE = "preprocess.toml"
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_EXAMPLE = 'resize = [224, 224], interpolation = "bicubic", mean = 127, scale = 0.0078125'


@dataclass(frozen=True)
class Preprocessing:
    """How pixels become the model's input: resize, crop, `(pixel - mean) * scale` with pixels of 0 to 255, layout."""

    resize: int | tuple[int, int] | None = None
    """Height and width; one number: of the shorter side; None: as they are."""
    crop: tuple[int, int] | None = None
    """Height and width that are cut out of the middle after resizing."""
    interpolation: Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"] = "bilinear"
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    color: Literal["RGB", "BGR", "gray"] = "RGB"
    mean: float | tuple[float, ...] = 0.0
    """Of all channels, or of each in the order of `color`."""
    scale: float | tuple[float, ...] = 1.0

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        channels = 1 if self.color == "gray" else 3
        for name in ("mean", "scale"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != channels:
                raise ValueError(f"{name} has {len(value)} numbers; expected 1 or {channels}, for {self.color}")
        for size in (self.resize, *(self.resize if isinstance(self.resize, tuple) else ()), *(self.crop or ())):
            if isinstance(size, int) and size < 1:
                raise ValueError(f"sizes are at least 1 pixel; found {size}")


def preprocessing_from_toml(path: Path) -> Preprocessing:
    """Raises KilnError naming the field that is wrong."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        return TypeAdapter(Preprocessing).validate_python(document)
    except ValidationError as error:
        where, problem = first_problem(error)
        raise KilnError(f"{path}: {f'{where}: ' if where else ''}{problem}; expected as in {_EXAMPLE}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KilnError(f"the preprocessing {path} cannot be read: {error}; expected TOML as in {_EXAMPLE}") from error


def image_files(folder: Path) -> list[Path]:
    """Images anywhere below a folder, sorted by path."""
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())


def samples_from_images(folder: Path, model: CalibrationModel, given: Path | None) -> Iterator[Sample]:
    """One sample an image, by the TOML file `given` or the folder's own `preprocess.toml`. Raises KilnError."""
    spec_file = given or folder / SPEC_FILE
    if not spec_file.is_file():
        raise KilnError(
            f"{folder} has no {SPEC_FILE} that says how its images become the model's input; write one, such as "
            f"{_EXAMPLE} (a line each), or give --preprocess FILE"
        )
    preprocessing = preprocessing_from_toml(spec_file)
    if len(model.inputs) != 1:
        names = ", ".join(spec.name for spec in model.inputs)
        raise KilnError(f"images suit a model with one input; this one takes {names}: give .npz batches")
    for file in image_files(folder):
        yield _sample(file, preprocessing, model)


def _sample(file: Path, preprocessing: Preprocessing, model: CalibrationModel) -> Sample:
    target = model.inputs[0]

    def read() -> dict[str, NDArray]:
        feed = {target.name: image_from_file(file, preprocessing, target)}
        model.check_feed(str(file), feed)
        return feed

    return Sample(str(file), 1, read)


def image_from_file(file: Path, spec: Preprocessing, target: InputSpec) -> NDArray:
    """One image [1, ...] in the layout of `spec` and the type of `target`. Raises KilnError for what is no image."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise KilnError(f"cannot import PIL ({error}), which reads images; install it: pip install pillow") from error
    try:
        with Image.open(file) as opened:
            image = opened.convert("L" if spec.color == "gray" else "RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
        raise KilnError(f"{file} cannot be read as an image: {first_line(error)}; replace or remove it") from error
    size = _resized(image.height, image.width, spec.resize)
    if size != (image.height, image.width):
        image = image.resize((size[1], size[0]), Image.Resampling[spec.interpolation.upper()])
    pixels = np.asarray(image, np.float32).reshape(image.height, image.width, -1)
    if spec.color == "BGR":
        pixels = pixels[..., ::-1]
    if spec.crop is not None:
        pixels = _cropped(file, pixels, spec.crop)
    pixels = (pixels - np.asarray(spec.mean, np.float32)) * np.asarray(spec.scale, np.float32)
    if np.dtype(target.dtype).kind in "iu":
        pixels = np.rint(pixels)
    if spec.layout == "NCHW":
        pixels = pixels.transpose(2, 0, 1)
    return np.ascontiguousarray(pixels[None].astype(target.dtype))


def _resized(height: int, width: int, resize: int | tuple[int, int] | None) -> tuple[int, int]:
    if isinstance(resize, int):
        short = min(height, width)
        return max(1, round(height * resize / short)), max(1, round(width * resize / short))
    return resize or (height, width)


def _cropped(file: Path, pixels: NDArray, crop: tuple[int, int]) -> NDArray:
    tops = [have - want for have, want in zip(pixels.shape, crop, strict=False)]
    if min(tops) < 0:
        raise KilnError(f"{file} has {pixels.shape[0]} x {pixels.shape[1]} pixels, less than the crop {list(crop)}")
    top, left = (room // 2 for room in tops)
    return pixels[top : top + crop[0], left : left + crop[1]]
