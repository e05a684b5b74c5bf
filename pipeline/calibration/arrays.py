"""Arrays as calibration samples: `.npz` batches, and what a user's `module:callable` yields."""

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from pipeline.calibration.samples import TOKENS, Feed, Sample
from pipeline.calibration.subject import CalibrationModel
from plugins.errors import KilnError, first_line


def samples_from_npz(path: Path, model: CalibrationModel) -> Iterator[Sample]:
    """One sample a row where the model takes any number of rows, else one a file. Raises KilnError."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            feed = dict(arrays.items())
    except (OSError, EOFError, ValueError, TypeError, AttributeError, BadZipFile) as error:  # a single .npy: no items
        raise KilnError(f"{path} is no .npz of arrays ({first_line(error)}); write one with numpy.savez") from error
    yield from samples_from_feed(str(path), feed, model)


def samples_from_feed(origin: str, feed: Feed, model: CalibrationModel) -> Iterator[Sample]:
    """Checked rows of one batch. For a decoder: `input_ids` [tokens] or [rows, tokens]."""
    if model.decoder is not None:
        yield from _token_rows(origin, feed, model)
        return
    model.check_feed(origin, feed)
    rows = {len(array) if array.ndim else 0 for array in feed.values()}
    if len(rows) != 1 or not all(spec.shape and isinstance(spec.shape[0], str) for spec in model.inputs):
        yield _sample(origin, feed, model)
        return
    count = rows.pop()
    for row in range(count):
        part = {name: array[row : row + 1] for name, array in feed.items()}
        yield _sample(f"{origin}, row {row}" if count > 1 else origin, part, model)


def _sample(origin: str, feed: Feed, model: CalibrationModel) -> Sample:
    length = int(feed[TOKENS].shape[-1]) if TOKENS in feed and model.limit is not None else 1
    return Sample(origin, length, lambda: feed)


def _token_rows(origin: str, feed: Feed, model: CalibrationModel) -> Iterator[Sample]:
    ids = feed.get(TOKENS)
    if set(feed) != {TOKENS} or ids is None or ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
        found = ", ".join(f"'{name}' {array.dtype} {list(array.shape)}" for name, array in feed.items()) or "nothing"
        raise KilnError(
            f"{origin} holds {found}; for a decoder expected '{TOKENS}', integers [tokens] or [rows, tokens]"
        )
    rows = np.atleast_2d(ids)
    for row, values in enumerate(rows):
        name = f"{origin}, row {row}" if len(rows) > 1 else origin
        yield model.sample_of_tokens(name, values.astype(np.int32))


def samples_from_callable(target: str, model: CalibrationModel) -> Iterator[Sample]:
    """What `module:callable` yields: dicts of arrays by input name, or lists of token ids. Raises KilnError."""
    module, _, attribute = target.partition(":")
    if str(Path.cwd()) not in sys.path:  # a console script's own folder is there instead
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # whatever the user's module raises
        raise KilnError(f"{target} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    if not callable(function):
        raise KilnError(f"the module '{module}' has no callable '{attribute}'; check --calibration")
    try:
        items = iter(function())
    except Exception as error:
        raise KilnError(f"{target} failed: {type(error).__name__}: {first_line(error)}") from error
    for number, item in enumerate(_items(target, items)):
        yield from _samples_from_item(f"{target}, item {number}", item, model)


def _items(target: str, items: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from items
    except KilnError:
        raise
    except Exception as error:
        raise KilnError(f"{target} failed: {type(error).__name__}: {first_line(error)}") from error


def _samples_from_item(origin: str, item: Any, model: CalibrationModel) -> Iterable[Sample]:
    if isinstance(item, Mapping):
        feed: dict[str, NDArray] = {str(name): np.asarray(value) for name, value in item.items()}
        return samples_from_feed(origin, feed, model)
    try:
        ids = np.asarray(item)
    except ValueError:  # a ragged list
        ids = np.empty(0, object)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise KilnError(
            f"{origin} is a {type(item).__name__}; expected a dict of arrays by input name, or a list of token ids"
        )
    if ids.size and not (np.abs(ids) < 2**31).all():
        raise KilnError(f"{origin} holds the token id {ids[np.abs(ids).argmax()]}, which no vocabulary has")
    return [model.sample_of_tokens(origin, ids.astype(np.int32))]
