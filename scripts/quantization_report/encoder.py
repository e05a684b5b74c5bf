"""MiniLM: embeddings of texts, and a task on them: which mails are spam."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.runtime.tokenizer import Tokenizer
from pipeline.compare.comparison import subject_from
from pipeline.gate.material import PlainData, PlainStratum, Sample, Task
from pipeline.gate.plain import PlainFigures, measure_samples, measure_task
from pipeline.quantize.config import QuantizeConfig
from plugins.errors import KilnError
from quantization_report.findings import Findings, Verdict, at_least, at_most
from quantization_report.plain import gain, milliseconds, size_and_gate, times_of, with_times
from quantization_report.setting import Setting

TASK = 0.01
"""Points of the task's accuracy that may be lost."""
COSINE = 0.98
"""Least mean cosine of W4A16's embeddings."""
SCHEMES = {
    "w8a8-dynamic": QuantizeConfig("w8a8-dynamic", search="all"),
    "w8a8": QuantizeConfig("w8a8", search="all"),
    "w4a16": QuantizeConfig("w4a16", search="all", rounding="awq", group_size=16),
}
"""Every layer is quantised: weights of 4 bits make none of them faster here. W4A16: in groups of 32 the cosine is 0.967
rounded to nearest, 0.969 by GPTQ, 0.977 by AWQ."""
_BATCH = 16
_LONGEST = 128
"""Tokens of a mail; the rest is cut."""


def minilm(setting: Setting) -> list[Findings]:
    maker = setting.maker("minilm", "minilm")
    tokenizer = maker.tokenizer
    assert tokenizer is not None
    texts, task = _texts(setting, tokenizer), _task(setting, tokenizer)
    made = {name: maker.make(name, config) for name, config in SCHEMES.items() if setting.wants(name)}
    times = times_of(maker, made, _batches([texts[0]])[0].feeds, setting)
    rows = [("float", *size_and_gate(maker, made, "float"), "", "", "", milliseconds(times.get("float")), "")]
    verdicts, data = [], {}
    for name, item in made.items():
        with setting.progress.stage(f"judge {name}"):
            figures, on_task = _measured(maker.parent.path, item.bundle.path, _batches(texts), task, setting.threads)
        data[name] = {**figures.values, **on_task.facts}
        verdicts += _verdicts(name, figures, on_task)
        accuracy = [on_task.facts[f"task accuracy, {side}"] for side in ("reference", "candidate")]
        rows.append(
            (
                name,
                *size_and_gate(maker, made, name),
                f"{figures.values['embedding_cosine']:.4f}",
                f"{figures.values['embedding_cosine_min']:.4f}",
                f"{accuracy[1]:.2%} of {accuracy[0]:.2%}",
                milliseconds(times.get(name)),
                gain(times, name),
            )
        )
    columns = ("graph", "layers", "MB", "gate", "mean cosine", "least", "spam found, of FP32's", "ms a text", "times")
    notes = [
        f"Cosines over {len(texts)} texts of 4 to 256 tokens of {setting.corpora.origin}; the task over "
        f"{sum(len(sample.labels) for sample in task.samples)} mails of SpamAssassin, half of them spam: softmax "  # type: ignore[arg-type]
        "regression on embeddings, trained on one half and tested on the other, on each graph's own embeddings. "
        "W4A16 by AWQ in groups of 16. "
        f"Times of one text of {len(texts[0])} tokens."
    ]
    return [Findings("minilm", "MiniLM-L6", columns, rows, verdicts, with_times(data, times), notes)]


def _verdicts(name: str, figures: PlainFigures, on_task: PlainFigures) -> list[Verdict]:
    if name == "w4a16":
        return [at_least(f"{name}: mean cosine of embeddings", figures.values["embedding_cosine"], COSINE)]
    return [at_most(f"{name}: accuracy of the spam task lost,", on_task.values["task_drop"], TASK)]


def _measured(
    reference: Path, candidate: Path, samples: Sequence[Sample], task: Task, threads: int
) -> tuple[PlainFigures, PlainFigures]:
    data = PlainData("embedding", (PlainStratum("all", samples),), "")
    with closing(subject_from(reference, threads)) as a, closing(subject_from(candidate, threads)) as b:
        return measure_samples(a, b, data, samples), measure_task(a, b, data, task)  # type: ignore[arg-type]


def _texts(setting: Setting, tokenizer: Tokenizer) -> list[list[int]]:
    """Beginning with one of 128 tokens, which is timed."""
    ids = tokenizer.encode(setting.corpora.novel[:200_000])[1:-1]
    lengths = (128, 4, 8, 16, 32, 64, 96, 256) * (1 if setting.quick else 8)
    edges = tokenizer.encode("")
    made, start = [], 0
    for length in lengths:
        made.append([edges[0], *ids[start : start + length - 2], edges[-1]])
        start += length
    return made


def _task(setting: Setting, tokenizer: Tokenizer) -> Task:
    """As many mails that are spam as that are not, evenly over the corpus; their headers are left out."""
    if not setting.corpora.mails:
        raise KilnError("MiniLM is judged on mails; give --corpora")
    wanted, samples = (20 if setting.quick else 250), []
    for spam in (False, True):
        mails = [text for text, is_spam in setting.corpora.mails if is_spam == spam]
        chosen = [mails[index * len(mails) // wanted] for index in range(wanted)]
        texts = [tokenizer.encode(_body(mail)[:4000]) for mail in chosen]
        cut = [[*ids[: _LONGEST - 1], ids[-1]] if len(ids) > _LONGEST else ids for ids in texts]
        samples += [Sample(batch.feeds, np.full(len(batch.feeds["input_ids"]), int(spam))) for batch in _batches(cut)]
    return Task("spam", samples)


def _body(mail: str) -> str:
    return mail.partition("\n\n")[2] or mail


def _batches(texts: Sequence[Sequence[int]]) -> list[Sample]:
    """Texts of about one length together, padded; their order is not kept."""
    ordered = sorted(texts, key=len)
    return [Sample(_feeds(part)) for part in _parts(ordered)]


def _parts(texts: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    for start in range(0, len(texts), _BATCH):
        yield texts[start : start + _BATCH]


def _feeds(texts: Sequence[Sequence[int]]) -> Mapping[str, NDArray]:
    ids = np.zeros((len(texts), max(map(len, texts))), np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
