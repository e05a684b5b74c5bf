"""Deserialises a plan whose key belongs here; what it needs beside it is put in. Runs nothing."""

from dataclasses import dataclass
from pathlib import Path

from engines.backends.tensorrt.api import ICudaEngine, Product, Runtime, TensorRt, tensorrt_module
from engines.backends.tensorrt.key import EngineKey, refuse_mismatch
from engines.backends.tensorrt.log import BuildLog, logger_for


@dataclass(frozen=True)
class OpenedEngine:
    """`log` holds what TensorRT says while it runs. `runtime` must outlive `engine`."""

    trt: TensorRt
    log: BuildLog
    runtime: Runtime
    engine: ICudaEngine


def open_engine(
    plan: Path,
    built: EngineKey,
    here: EngineKey,
    *,
    weights: Path | None = None,
    streaming_budget: int | None = None,
    product: Product = "tensorrt",
) -> OpenedEngine:
    """Deserialise a plan whose key belongs here; `weights` is the ONNX model that a plan without weights is refitted
    from, `streaming_budget` the bytes of weights that stay on the GPU.

    Raises KilnError before deserialising where the keys differ, and with TensorRT's reason where it fails.
    """
    refuse_mismatch(built, here, plan)
    trt, log = tensorrt_module(product), BuildLog()
    logger = logger_for(trt, log)
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = built.version_compatible
    engine = runtime.deserialize_cuda_engine(plan.read_bytes())
    if engine is None:
        raise log.error(f"open {plan}", "rebuild the bundle on this machine")
    if weights is not None:
        refitter = trt.Refitter(engine, logger)
        refitted = trt.OnnxParserRefitter(refitter, logger).refit_from_file(str(weights))
        missing = refitter.get_missing_weights() if refitted else []
        if not refitted or missing or not refitter.refit_cuda_engine():
            lacking = f"; without values are {', '.join(missing[:3])}" if missing else ""
            raise log.error(f"put the weights of {weights} into {plan}{lacking}", "rebuild the bundle")
    if streaming_budget is not None:
        engine.weight_streaming_budget_v2 = streaming_budget
    return OpenedEngine(trt, log, runtime, engine)
