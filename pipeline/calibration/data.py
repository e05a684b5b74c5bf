"""`--calibration SPEC`: from what a user names to a `CalibrationSet` of one model.

SPEC is a text file, a JSON Lines file, an `.npz`, a folder of such files or of images, or `module:callable`; a prefix
`lines:` or `text:` says how to read text (`pipeline.calibration.text`). Several SPECs make one set.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.calibration.arrays import samples_from_callable, samples_from_npz
from pipeline.calibration.images import SPEC_FILE, SUFFIXES, image_files, samples_from_images
from pipeline.calibration.samples import CalibrationSet, Draw, Sample, drawn_set
from pipeline.calibration.strata import UNSIZED, Strata, strata_from_text, strata_of_limit
from pipeline.calibration.subject import CalibrationModel
from pipeline.calibration.text import TextKind, TokenSample, samples_from_jsonl, samples_from_text
from plugins.errors import KilnError

FORMS = "a text, .jsonl or .npz file, a folder of them or of images, or module:callable"
_CALLABLE = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
_TEXT = (".txt", ".text", ".md", "")


@dataclass(frozen=True)
class DataConfig:
    """`samples`: so many of each length stratum, and of what has no length eight times as many."""

    samples: int = 8
    tokens: int = 512
    """Where a stratum's samples have fewer in all, more samples are taken."""
    seed: int = 0
    strata: str | None = None
    """Bounds as `pipeline.calibration.strata.strata_from_text` reads them; None: by the context limit."""
    preprocess: Path | None = None
    """TOML file for images, where their folder has none."""

    def draw(self, strata: Strata) -> Draw:
        return Draw(self.samples if strata.sized else 8 * self.samples, self.tokens, self.seed)


def strata_of(model: CalibrationModel, config: DataConfig) -> Strata:
    """Of a model's samples. Raises KilnError for bounds where lengths have no meaning."""
    if model.limit is None:
        if config.strata:
            raise KilnError(
                "the model says no context limit, so it has no length strata; leave --strata out or give --max-context"
            )
        return UNSIZED
    return strata_from_text(config.strata, model.limit) if config.strata else strata_of_limit(model.limit)


def calibration_set(specs: Sequence[str], model: CalibrationModel, config: DataConfig = DataConfig()) -> CalibrationSet:
    """Read and draw. Raises KilnError naming the file and line of what is wrong."""
    if not specs:
        raise KilnError(f"no calibration data was named; expected {FORMS}")
    strata = strata_of(model, config)
    pool = [sample for spec in specs for sample in _samples(spec, model, strata, config)]
    return drawn_set(", ".join(specs), pool, strata, config.draw(strata))


def _samples(spec: str, model: CalibrationModel, strata: Strata, config: DataConfig) -> Iterator[Sample]:
    kind: TextKind = "auto"
    path = Path(spec).expanduser()
    for prefix in ("lines", "text"):
        if spec.startswith(f"{prefix}:") and not path.exists():
            kind, path = prefix, Path(spec.removeprefix(f"{prefix}:")).expanduser()
    if kind == "auto" and not path.exists() and _CALLABLE.match(spec):
        return samples_from_callable(spec, model)
    if path.is_dir():
        return _from_folder(path, model, strata, config, kind)
    if not path.is_file():
        raise KilnError(f"the calibration data '{spec}' does not exist; expected {FORMS}")
    return _from_file(path, model, strata, config, kind)


def _from_folder(
    folder: Path, model: CalibrationModel, strata: Strata, config: DataConfig, kind: TextKind
) -> Iterator[Sample]:
    if image_files(folder):
        yield from samples_from_images(folder, model, config.preprocess)
        return
    known = (*_TEXT[:-1], ".jsonl", ".npz")
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix.lower() in known)
    if not files:
        raise KilnError(f"{folder} holds no {', '.join(known)} files and no images ({', '.join(SUFFIXES)})")
    for file in files:
        yield from _from_file(file, model, strata, config, kind)


def _from_file(
    path: Path, model: CalibrationModel, strata: Strata, config: DataConfig, kind: TextKind
) -> Iterator[Sample]:
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return samples_from_npz(path, model)
    if suffix == ".jsonl":
        return _of_tokens(samples_from_jsonl(path, model.tokenizer), model)
    if suffix in SUFFIXES:
        raise KilnError(f"{path} is one image; expected a folder of images with a {SPEC_FILE}")
    if suffix not in _TEXT and kind == "auto":
        raise KilnError(f"{path} is no .txt, .jsonl or .npz file; expected {FORMS} (text:{path} reads it as text)")
    found = samples_from_text(path, model.tokenizer, strata, config.draw(strata), kind)
    return _of_tokens(found, model)


def _of_tokens(found: Iterator[TokenSample], model: CalibrationModel) -> Iterator[Sample]:
    return (model.sample_of_tokens(sample.origin, sample.token_ids) for sample in found)
