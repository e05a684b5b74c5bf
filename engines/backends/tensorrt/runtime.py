"""Models without a KV cache in a TensorRT engine. Implements `InferBackend`.

Not executed on the machines that Kiln is tested on: docs/tensorrt.md says which command checks it.
"""

from collections.abc import Mapping, Sequence

from numpy.typing import NDArray

from engines.backends.checking import check_inputs
from engines.backends.cuda_memory import Runtime
from engines.backends.tensorrt.layer_times import LayerTimes
from engines.backends.tensorrt.loading import OpenedEngine
from engines.backends.tensorrt.profiles import Profile, profile_for
from engines.backends.tensorrt.running import EngineRunner
from passes.onnx_model import Tensor


class TensorRtModel:
    """One thread calls `infer` at a time. Raises as `EngineRunner`; the engine's runtime is closed with it."""

    def __init__(
        self,
        opened: OpenedEngine,
        inputs: Sequence[Tensor],
        profiles: Sequence[Profile],
        runtime: Runtime,
        times: LayerTimes | None = None,
    ) -> None:
        self._runner, self._runtime = EngineRunner(opened, inputs, profiles, runtime, times=times), runtime
        self._tensors, self._profiles = tuple(inputs), tuple(profiles)
        self.inputs, self.outputs = self._runner.inputs, self._runner.outputs
        self._open = True

    def check(self, inputs: Mapping[str, NDArray]) -> None:
        """Raise KilnError naming a missing, unknown, mis-shaped or mis-typed input. Types are not converted."""
        check_inputs(self.inputs, inputs)
        profile_for(self._profiles, self._tensors, {name: array.shape for name, array in inputs.items()})

    def infer(self, inputs: Mapping[str, NDArray]) -> dict[str, NDArray]:
        """Run once; the outputs are owned by the caller."""
        self.check(inputs)
        return self._runner.run(inputs)

    def close(self) -> None:
        """Free contexts, graphs and buffers. The backend is unusable afterwards; a second call does nothing."""
        if self._open:
            self._open = False
            self._runner.close()
            self._runtime.close()
