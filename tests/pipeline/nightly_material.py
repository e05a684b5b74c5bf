"""Tiny models on disk, a configuration for them, nights over them in this process, and what to read in reports."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from engines.sku import host_cpu_features
from pipeline.nightly.config import NightlyConfig, config_from_toml
from pipeline.nightly.executor import Limits, Outcome, Task, Told
from pipeline.nightly.fingerprint import Machine
from pipeline.nightly.journal import Journal, only_run
from pipeline.nightly.report import JobReport, NightlyReport
from pipeline.nightly.run import Nightly
from pipeline.nightly.tasks import TASKS
from pipeline.progress import Progress
from pipeline.registry.keys import create_key, public_path, signing_key_from_pem, trusted_keys_from_file
from pipeline.registry.registry import Registry
from pipeline.registry.store import Store
from plugins.errors import KilnError

SKU = "cpu-avx2"
FAR = """
[cpu-far]
like = "cpu-avx2"
cpu_features = ["avx2", "fma", "f16c", "a-feature-of-other-machines"]
source = "made up: a machine that is not here"
"""


def save_mlp(path: Path, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    weights = {"a": random.normal(size=(64, 128)), "b": random.normal(size=(128, 10))}
    nodes = [_node("MatMul", "x a", "h"), _node("Relu", "h", "r"), _node("MatMul", "r b", "y")]
    _save(path, nodes, {"x": ["n", 64]}, {"y": ["n", 10]}, weights)


def save_conv(path: Path, variance: float = 1.0) -> None:
    """`variance` scales the batch norm's constant: wrong ones still make a sound graph."""
    random = np.random.default_rng(1)
    weights = {
        "w": random.normal(size=(8, 3, 3, 3)),
        **{name: random.uniform(0.5, 1.5, 8) for name in ("scale", "shift", "mean")},
        "variance": random.uniform(0.5, 1.5, 8) * variance,
        "f": random.normal(size=(8, 10)),
    }
    nodes = [
        _node("Conv", "x w", "c", pads=[1, 1, 1, 1]),
        _node("BatchNormalization", "c scale shift mean variance", "bn"),
        _node("Relu", "bn", "r"),
        _node("GlobalAveragePool", "r", "p"),
        _node("Flatten", "p", "q"),
        _node("MatMul", "q f", "y"),
    ]
    _save(path, nodes, {"x": ["n", 3, 16, 16]}, {"y": ["n", 10]}, weights)


def save_embedding(path: Path, work: int = 0) -> None:
    """`work` adds so many products that change nothing but the time."""
    random = np.random.default_rng(2)
    weights = {"table": random.normal(size=(100, 48)), "w": random.normal(size=(48, 32))}
    nodes = [_node("Gather", "table ids", "g"), _node("MatMul", "g w", "y0")]
    if work:
        weights |= {"up": random.normal(size=(32, 768)), "big": random.normal(size=(768, 768)) / 28}
        nodes.append(_node("MatMul", "y0 up", "b0"))
        nodes += [_node("MatMul", f"b{i} big", f"b{i + 1}") for i in range(work)]
        weights |= {"down": np.zeros((768, 32))}
        nodes += [_node("MatMul", f"b{work} down", "zero"), _node("Add", "y0 zero", "y")]
    else:
        nodes[-1].output[0] = "y"
    _save(path, nodes, {"ids": ["n", "t"]}, {"y": ["n", "t", 32]}, weights, TensorProto.INT64)


def save_norm(path: Path) -> None:
    random = np.random.default_rng(3)
    weights = {"w": random.normal(size=(32, 32)), "scale": random.uniform(0.5, 2, 32), "shift": random.normal(size=32)}
    nodes = [
        _node("MatMul", "x w", "h"),
        _node("Add", "h x", "s"),
        _node("LayerNormalization", "s scale shift", "y", axis=-1),
    ]
    _save(path, nodes, {"x": ["n", 32]}, {"y": ["n", 32]}, weights)


def _node(kind: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], **attributes)


def _save(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, list],
    outputs: Mapping[str, list],
    weights: Mapping[str, np.ndarray],
    dtype: int = TensorProto.FLOAT,
) -> None:
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


SAVE = {"mlp": save_mlp, "conv": save_conv, "embedding": save_embedding, "norm": save_norm}


class InProcess:
    """An executor without processes."""

    slots = 1

    def run(self, task: Task, limits: Limits, told: Told) -> Outcome:
        task.folder.mkdir(parents=True, exist_ok=True)
        try:
            return Outcome("done", TASKS[task.kind](task.folder, task.options), "", 0.0)
        except KilnError as error:
            return Outcome("refused", None, str(error), 0.0)


class World:
    """A folder with models, keys, a registry and a configuration."""

    def __init__(self, folder: Path, models: tuple[str, ...], skus: tuple[str, ...], settings: str = "") -> None:
        self.folder, self.models = folder, folder / "models"
        self.models.mkdir(parents=True)
        for name in models:
            SAVE[name](self.models / f"{name}.onnx")
        create_key(folder / "k.pem")
        (folder / "skus.toml").write_text(FAR)
        entries = "".join(f'[models.{name}]\nsource = "models/{name}.onnx"\n' for name in models)
        self.path = folder / "nightly.toml"
        self.path.write_text(
            'registry = "registry"\nkey = "k.pem"\ntrust = "k.pem.pub"\nwork = "work"\nsku_file = "skus.toml"\n'
            f"skus = {list(skus)!r}\n{settings}\n"
            "[accuracy]\ncount = 3\n[speed]\nlimit = 0.5\npairs = 9\nmost_pairs = 99\nseconds = 0.002\n"
            f"[determinism]\nrebuilds = 1\nsamples = 2\n{entries}"
        )

    @property
    def config(self) -> NightlyConfig:
        return config_from_toml(self.path)

    @property
    def store(self) -> Store:
        return Store(str(self.folder / "registry"))

    def registry(self, store: Store | None = None) -> Registry:
        trusted = trusted_keys_from_file(public_path(self.folder / "k.pem"))
        return Registry(store or self.store, trusted, signing_key_from_pem(self.folder / "k.pem"), "nightly")

    def machine(self, code: str = "code-1", more_features: tuple[str, ...] = ()) -> Machine:
        return Machine(features=host_cpu_features() | set(more_features), code=code)

    def nightly(self, silent: Progress, code: str = "code-1", store: Store | None = None, **options: Any) -> Nightly:
        journal = Journal(self.config.work / "journal.jsonl")
        nightly = Nightly(self.config, self.registry(store), InProcess(), self.machine(code), journal, silent)
        return replace(nightly, **options)

    def night(
        self, silent: Progress, code: str = "code-1", store: Store | None = None, **options: Any
    ) -> NightlyReport:
        """One whole run."""
        with only_run(self.config.work):
            nightly = self.nightly(silent, code, store, **options)
            report = nightly.rebuild()
            nightly.journal.end()
        return report

    def make_stable(self) -> None:
        """What people do with canaries."""
        registry = self.registry()
        for model, sku in registry.pairs():
            if registry.channel(model, sku, "canary") is not None:
                registry.promote(model, sku, "stable")

    def content(self) -> dict[str, Any]:
        """What a registry holds, without times and what depends on them: a bundle's identity, speeds."""
        registry = self.registry()
        found: dict[str, Any] = {}
        for item in registry.listing():
            release = item.release
            assert registry.check(release) == []
            engine = {name: file.sha256 for name, file in release.files.items() if not name.startswith("manifest.")}
            judged = item.attestation
            gates = None if judged is None else {name: text[:6] for name, text in judged.findings.items()}
            attestation = None if judged is None else (judged.number, judged.passed, gates)
            inputs = sorted(release.inputs.items())
            found[f"{release.model} {release.sku} {release.version}"] = (engine, item.channels, attestation, inputs)
        for model, sku in registry.pairs():
            for channel in ("candidate", "canary", "stable"):
                head = registry.channel(model, sku, channel)
                if head is not None:
                    found[f"{model} {sku} {channel}"] = (head.number, head.version, head.action, head.previous)
        leftovers = [key for key in registry.store.keys("") if key.startswith(("leases", "gc"))]
        return {**found, "leftovers": leftovers}


def only(report: NightlyReport) -> JobReport:
    (job,) = report.jobs
    return job


def cases(job: JobReport) -> dict[str, str]:
    return {case.name: case.status for case in job.cases}


def text_of(job: JobReport, name: str) -> str:
    return next(case.text for case in job.cases if case.name == name)
