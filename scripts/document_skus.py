"""Writes docs/skus.md from the SKU table: `python scripts/document_skus.py`. A test keeps the page current."""

from pathlib import Path

from engines.sku import Precision, Sku, sku_table
from pipeline.cli_sku import backend_text
from pipeline.forecast import RESERVE, size

PAGE = Path(__file__).parents[1] / "docs" / "skus.md"
_PEAKS: tuple[Precision, ...] = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8", "fp4")

_TOP = """# Machine types

<!-- Written by scripts/document_skus.py from engines/skus.toml: change those. -->

A SKU is a machine type that an engine is built for. The table below is what Kiln knows of each.

```sh
kiln sku list
kiln sku show l4
kiln sku detect
kiln sku forecast smollm2 --html reports/machines.html
kiln doctor --sku cpu
build-engine smollm2 --sku cpu-avx2 --sku cpu-avx512
```

`kiln sku detect` names this machine's. For a machine elsewhere, run there
`nvidia-smi --query-gpu=index,name,memory.total,compute_cap,driver_version --format=csv,noheader,nounits` and give the
output as `--nvidia-smi FILE`. `kiln doctor` shows what is installed; with `--sku NAME` it lists what that SKU needs,
what is missing and the command that installs it, and its exit code says whether engines for it can be built and run
here (0) or not (1). In this version `build-engine` builds for CPUs; `kiln tensorrt build` makes TensorRT bundles
of ONNX models without a KV cache on a machine with the GPU; of the rest there are graphs (`kiln optimize --sku`) and
forecasts, and `build-engine` and `kiln doctor` say so.

With several `--sku`, the model is exported once, and SKUs that get the same graph (all with the CPU's provider, or all
with CUDA's) share passes, checks and files: the second bundle's files are links to the first's.

## Numbers

Memory is what the driver reports as the total. Bandwidth is the advertised peak. Peaks are dense, in 10^12
operations/s, a multiply-add being two; floating-point products in tensor cores add up in FP32 (GeForce cards do that
at half their FP16 rate), `fp32` is that of the CUDA cores. An empty cell: the hardware does not multiply the type, or
no source gives the rate, and the notes below the table say which. A CPU type has no numbers: `kiln bench` measures the
machine's.
"""

_BOTTOM = f"""
The attention plugin needs sm_80 or newer. A decoder for an older GPU has only the plugin-free form, TensorRT's own
attention layers over a linear KV cache, and `build-engine --sku t4` of a decoder says so. TensorRT is the default where
that is the only way (T4) or what the system brings (Jetson); elsewhere it is ONNX Runtime's CUDA provider, with TF32
off so that FP32 engines are FP32.

## Forecast

`build-engine` prints it before it reads weights, and `kiln sku forecast MODEL` for all SKUs side by side:

- it fits if the weights, and beside them one sequence of the shortest length, fit {1 - RESERVE:.0%} of the memory;
- the largest batch is what of that the weights leave, divided by the cache of a sequence of the given length; for a
  model without a cache, by the most bytes of activations that one sample has alive at a time;
- rates are rooflines: operations divided by the peak, or bytes of weights and cache divided by the bandwidth,
  whichever takes longer (`p` in the table: products, `r`: reading). No engine reaches them; `kiln bench` measures one.

A rate that the table lacks is not guessed: the cell stays empty.

## Your own

A TOML file of the same form adds types, wherever `--sku` is taken:

```sh
build-engine model --sku my-gpu --sku-file mine.toml
```

```toml
[my-gpu]
like = "l4"                        # start from this entry; leave it out and give every key
names = ["NVIDIA L4 24Q"]          # as nvidia-smi says it, for kiln sku detect
memory = 24_152_899_584            # bytes
bandwidth = 300e9                  # bytes/s
peak = {{ fp32 = 30.3e12, fp16 = 121e12 }}  # dense operations/s
source = "its data sheet, 2023"
```

Keys are {{keys}}. A mistake is an error that names file, SKU and key.
"""


def page() -> str:
    """The whole page."""
    table = list(sku_table().values())
    keys = ", ".join(f"`{field}`" for field in Sku.model_fields if field != "name")
    return "\n".join([_TOP, _table(table), "", _notes(table), _BOTTOM.replace("{keys}", keys)])


def _table(skus: list[Sku]) -> str:
    headings = ["SKU", "machine", "architecture", "memory", "GB/s", *_PEAKS, "default backend", "attention plugin"]
    lines = [f"| {' | '.join(headings)} |", "|---" * 3 + "|--:" * (2 + len(_PEAKS)) + "|---|---|"]
    for sku in skus:
        cells = [
            f"`{sku.name}`",
            sku.title,
            f"{sku.generation} {sku.arch}".strip(),
            size(sku.memory) if sku.memory else "",
            f"{sku.bandwidth / 1e9:,.5g}" if sku.bandwidth else "",
            *(f"{sku.peak[name] / 1e12:,.5g}" if name in sku.peak else "" for name in _PEAKS),
            backend_text(sku),
            ", ".join(sku.plugin_architectures) or "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _notes(skus: list[Sku]) -> str:
    return "\n".join(f"- `{sku.name}`: {sku.source}." for sku in skus)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
