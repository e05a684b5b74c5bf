"""Prefix hits of two Ray replicas by routing policy, on a real cluster of three node processes on this machine.

    python scripts/ray_prefix_hits.py --out docs/benchmarks/ray-prefix-hits.txt

The trace: 64 prefixes of 512 random tokens, each asked for 4 times with 32 tokens of its own after it and 8 tokens of
answer, all in random order, 8 requests at a time. Each replica's cache has the blocks of 36 prefixes. What counts is
the engines' own: `kiln_prefix_hits`, `kiln_prefix_lookups` and `kiln_prefix_saved_tokens` of /metrics.
"""

import argparse
import platform
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from engines.bundle import open_bundle
from engines.server.options import EngineOptions
from pipeline.deploy import application
from pipeline.deploy.bundles import FolderSource
from pipeline.deploy.options import Contract, DeployOptions, HttpOptions, ReplicaCount
from pipeline.deploy.prefixes import Routing, RoutingConfig

PREFIXES, PREFIX, TIMES, OWN, ANSWER, HELD, AT_ONCE = 64, 512, 4, 32, 8, 36, 8
POLICIES: tuple[Routing, ...] = ("round-robin", "least-loaded", "prefix")
COUNTERS = ("kiln_prefix_lookups", "kiln_prefix_hits", "kiln_prefix_saved_tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="a decoder's bundle; by default a tiny random Llama is built")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8231)
    parser.add_argument("--out", type=Path, help="also write the table there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = options.bundle or tiny_bundle(Path(folder))
        lines = measured(bundle, options.seed, options.port)
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


def tiny_bundle(folder: Path) -> Path:
    """A random Llama of two layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pipeline.build import build
    from pipeline.config import BuildConfig
    from pipeline.progress import Progress

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    build(str(folder / "model"), ["cpu"], BuildConfig(out=folder / "bundle"), Progress())
    return folder / "bundle"


def measured(bundle: Path, seed: int, port: int) -> list[str]:
    """The table, a line for each policy."""
    import ray
    from ray.cluster_utils import Cluster

    manifest = open_bundle(bundle).manifest
    assert manifest.decoder is not None, "a decoder's bundle is needed"
    blocks = HELD * -(-PREFIX // manifest.decoder.kv.block_size)
    small = {"include_dashboard": False, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        ray.init(address=cluster.address, namespace="kiln", log_to_driver=False, logging_level="error")
        found = {policy: hits(bundle, policy, blocks, seed, port) for policy in POLICIES}
    finally:
        ray.shutdown()
        cluster.shutdown()
    base = found["round-robin"]
    return [
        f"python {' '.join(sys.argv)}",
        f"ray {ray.__version__}, 3 node processes, 2 replicas of {manifest.name}, {blocks} blocks of "
        f"{manifest.decoder.kv.block_size} tokens each; {platform.processor() or platform.machine()}",
        f"{PREFIXES} prefixes of {PREFIX} tokens x {TIMES}, shuffled with seed {seed}, {AT_ONCE} at a time",
        "",
        f"{'routing':14}{'requests':>9}{'hits':>7}{'hit rate':>10}{'of round-robin':>16}{'prefix tokens saved':>21}",
        *(
            f"{policy:14}{lookups:9.0f}{hit:7.0f}{hit / lookups:10.1%}{hit / lookups / (base[1] / base[0]):15.2f}x"
            f"{saved / (lookups * PREFIX):21.1%}"
            for policy, (lookups, hit, saved) in found.items()
        ),
    ]


def hits(bundle: Path, policy: Routing, blocks: int, seed: int, port: int) -> tuple[float, float, float]:
    """Lookups, hits and saved tokens of all replicas."""
    source = FolderSource.open(bundle)
    options = DeployOptions(
        "kiln",
        Contract.of(source.manifest()),
        EngineOptions(max_running=4, kv_blocks=blocks, threads=1),
        ReplicaCount(2, 2),
        {"num_cpus": 1},
        HttpOptions("model"),
        RoutingConfig(policy),
        places=4,
        drain=5.0,
    )
    url, start = application.up(options, source, "127.0.0.1", port), time.monotonic()
    try:
        with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(AT_ONCE) as pool:
            for status in pool.map(lambda prompt: ask(client, prompt), trace(seed)):
                assert status == 200, f"a request was answered {status}"
            text = client.get("/metrics").text
        print(f"{policy}: {time.monotonic() - start:.1f} s", file=sys.stderr)
        return tuple(total(text, counter) for counter in COUNTERS)  # type: ignore[return-value]
    finally:
        application.down("kiln")


def trace(seed: int) -> list[list[int]]:
    noise = random.Random(seed)
    prefixes = [noise.choices(range(3, 500), k=PREFIX) for _ in range(PREFIXES)]
    prompts = [prefix + noise.choices(range(3, 500), k=OWN) for prefix in prefixes for _ in range(TIMES)]
    noise.shuffle(prompts)
    return prompts


def ask(client: httpx.Client, prompt: list[int]) -> int:
    body = {"model": "model", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=body).status_code


def total(text: str, counter: str) -> float:
    """A counter of /metrics, added up over replicas."""
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{counter}_total{{"))


if __name__ == "__main__":
    main()
