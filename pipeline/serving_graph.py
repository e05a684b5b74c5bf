"""A Hugging Face decoder as a serving graph: packed tokens in, paged attention inside.

`serving_module` wraps the model with the inputs of `plugins.paged_attention.schema.STEP_INPUTS` and the
caches. While it runs, the model's attention is an `AttentionInterface` function that emits the
paged-attention operator, and its masks are None: causality is the operator's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from plugins.errors import KilnError
from plugins.paged_attention.schema import EXPORT_DOMAIN, OP_TYPE, SINCE_VERSION, KvLayer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

NAME = "kiln_paged"


def serving_module(model: "PreTrainedModel") -> "torch.nn.Module":
    """A module: forward(*step inputs, key caches, value caches) -> (logits, key caches, value caches).

    Step inputs are int32, in the order of STEP_INPUTS; logits are [rows, vocabulary].
    """
    import torch

    class ServingDecoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.eval()

        def forward(
            self,
            input_ids: torch.Tensor,
            position_ids: torch.Tensor,
            logits_indices: torch.Tensor,
            cumulative_sequence_length: torch.Tensor,
            past_seqlens: torch.Tensor,
            block_table: torch.Tensor,
            slot_mapping: torch.Tensor,
            key_caches: list[torch.Tensor],
            value_caches: list[torch.Tensor],
        ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
            ragged = (cumulative_sequence_length, past_seqlens, block_table, slot_mapping)
            attention = _PagedAttention(key_caches, value_caches, ragged)
            with attention_function(self.model, attention):
                logits = self.model(
                    input_ids=input_ids[None],
                    position_ids=position_ids[None],
                    use_cache=False,
                    logits_to_keep=logits_indices.long(),  # ONNX selects by int64 only
                ).logits
            # Not logits[0], which ONNX has as Gather, a copy of them all.
            return logits.squeeze(0), attention.keys_out, attention.values_out

    return ServingDecoder()


class _PagedAttention:
    """The attention function of one traced pass: each call emits the operator for the next layer."""

    def __init__(
        self, key_caches: "list[torch.Tensor]", value_caches: "list[torch.Tensor]", ragged: "tuple[torch.Tensor, ...]"
    ) -> None:
        self.caches = list(zip(key_caches, value_caches, strict=True))
        self.ragged = ragged
        self.keys_out: list[torch.Tensor] = []
        self.values_out: list[torch.Tensor] = []

    def __call__(
        self,
        module: "torch.nn.Module",
        query: "torch.Tensor",
        key: "torch.Tensor",
        value: "torch.Tensor",
        attention_mask: None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **options: Any,
    ) -> "tuple[torch.Tensor, None]":
        import torch

        batch, heads, tokens, head_dim = query.shape
        kv_heads = key.shape[1]
        key_cache, value_cache = self.caches[len(self.keys_out)]
        attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads}
        if scaling is not None:
            attributes["scale"] = float(scaling)
        if softcap:
            attributes["softcap"] = float(softcap)
        if sliding_window is not None:
            attributes["local_window_size"] = int(sliding_window)
        *cumulative_past_table, slot_mapping = self.ragged
        output, key_out, value_out = torch.onnx.ops.symbolic_multi_out(
            f"{EXPORT_DOMAIN}::{OP_TYPE}",
            [
                query.transpose(1, 2).reshape(tokens, heads * head_dim),
                key.transpose(1, 2).reshape(tokens, kv_heads * head_dim),
                value.transpose(1, 2).reshape(tokens, kv_heads * head_dim),
                key_cache,
                value_cache,
                *cumulative_past_table,
                None,  # cos_cache and sin_cache: rotation stays plain arithmetic, for the passes to fuse
                None,
                slot_mapping,
            ],
            attrs=attributes,
            dtypes=(query.dtype, key_cache.dtype, value_cache.dtype),
            shapes=((tokens, heads * head_dim), key_cache.shape, value_cache.shape),
            version=SINCE_VERSION,
        )
        self.keys_out.append(key_out)
        self.values_out.append(value_out)
        return output.reshape(batch, tokens, heads, head_dim), None


def kv_layers(model: "PreTrainedModel") -> tuple[KvLayer, ...]:
    """Cache geometry by running three tokens through the model. Raises KilnError for attention Kiln cannot carry."""
    import torch

    layers: list[KvLayer] = []
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []

    def record(
        module: "torch.nn.Module",
        query: "torch.Tensor",
        key: "torch.Tensor",
        value: "torch.Tensor",
        *_: Any,
        **options: Any,
    ) -> "tuple[torch.Tensor, None]":
        where = f"{type(module).__name__} (layer {len(layers)})"
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise KilnError(
                f"{where} has heads of sizes query {query.shape[-1]}, key {key.shape[-1]}, value {value.shape[-1]}; "
                "Kiln's paged attention needs one size for all three"
            )
        if options.get("s_aux") is not None:
            raise KilnError(f"{where} uses attention sinks (s_aux), which Kiln's paged attention does not carry")
        if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
            raise KilnError(f"{where} is not causal; only decoders can use a KV cache")
        kind = kinds[len(layers)] if len(layers) < len(kinds) else "full_attention"
        if kind not in ("full_attention", "sliding_attention"):
            raise KilnError(f"{where} is a layer of type {kind}; Kiln carries full_attention and sliding_attention")
        if kind == "sliding_attention" and options.get("sliding_window") is None:
            raise KilnError(
                f"{where} leaves its sliding window to the attention mask, which Kiln does not carry; its attention "
                "function must take sliding_window, as Mistral's and Gemma's do"
            )
        layers.append(KvLayer(kv_heads=key.shape[1], head_dim=key.shape[-1]))
        return query.transpose(1, 2), None

    ids = torch.zeros(1, 3, dtype=torch.int32)
    with torch.no_grad(), attention_function(model, record), runs(model):
        model(input_ids=ids, position_ids=torch.arange(3, dtype=torch.int32)[None], use_cache=False)
    expected = model.config.get_text_config().num_hidden_layers
    if len(layers) != expected:
        raise KilnError(
            f"{type(model).__name__} called its attention function {len(layers)} times for {expected} layers; "
            "Kiln builds decoders in which every layer has one causal self-attention"
        )
    return tuple(layers)


@contextmanager
def runs(model: "torch.nn.Module") -> Iterator[None]:
    """Turn whatever a user's model raises on its example inputs into a KilnError."""
    try:
        yield
    except KilnError:
        raise
    except Exception as error:
        raise KilnError(
            f"{type(model).__name__} failed on example inputs: {type(error).__name__}: {error}; "
            "check its configuration, or wrap it in a module:callable that returns the module and inputs it accepts"
        ) from error


@contextmanager
def attention_function(model: "PreTrainedModel", function: Any) -> Iterator[None]:
    """Let `function` be the model's attention, without any mask, inside the block."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, function)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
