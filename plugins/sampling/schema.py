"""Names, shapes and meaning of the operators that choose tokens, and of the graphs that carry them.

Single source of truth: the pass that binds them, the kernels and the runtime take their names from here.

`kiln::Sample` chooses one token for each row of logits, by that row's own numbers. Greedy unless `temperature` is above
0: the highest logit, the lowest id among equals. Else, in the order and with the meaning of `engines.runtime.sampler`:

1. distance d = best - logit and x = d * s, s = min(log2(e) / temperature, largest float), each rounded to float32;
2. `top_k` > 0 keeps the k tokens of the smallest distance, of equals the lowest ids;
3. a token weighs 2^40 * 2^-x, in integers (`reference.weights_of` has every bit of it); 0 from x = 40 on;
4. `top_p` < 1 keeps the smallest distances whose weights together reach floor(top_p * all kept weights), the last one's
   equals with it;
5. `min_p` > 0 keeps weights of at least floor(min_p * 2^40);
6. the token is the first, by id, at which the sum of kept weights exceeds floor(r * all kept weights / 2^64).

r is 64 bits of Philox4x32-10 (Salmon et al., 2011) with the key `seed` and the counter `sample_position`: no state, so
a row's draw depends on nothing but these two. And since sums are of integers, no order of summation shows: a row's
token is the same in every batch, on every device and in NumPy, to the bit, given the same logits. A row with a NaN, or
without a finite best, gives -1. `top_k` <= 0, `top_p` >= 1 and `min_p` <= 0 filter nothing.

`kiln::FeedTokens` puts what an earlier step chose into a step's ids: where `feed` is 0 or more, `previous[feed]` is
taken instead of the id; 0 instead of a `previous` of -1, so that an embedding can be read for it.

On CUDA logits may be of a 16-bit type, which is as if they were converted first. The numbers in the index tensors are
not checked there: a `feed` outside of `previous` takes the id.
"""

from plugins.spec import OperatorSpec, TensorSpec

_ROWS = ("rows",)

SAMPLE = OperatorSpec(
    "Sample",
    inputs=(
        TensorSpec("logits", ("rows", "vocabulary"), ("float32",)),
        TensorSpec("temperature", _ROWS, ("float32",)),
        TensorSpec("top_k", _ROWS, ("int32",)),
        TensorSpec("top_p", _ROWS, ("float32",)),
        TensorSpec("min_p", _ROWS, ("float32",)),
        TensorSpec("seed", _ROWS, ("int64",)),
        TensorSpec("sample_position", _ROWS, ("int32",)),
    ),
    outputs=(TensorSpec("tokens", _ROWS, ("int32",)),),
    attributes={},
)
FEED_TOKENS = OperatorSpec(
    "FeedTokens",
    inputs=(
        TensorSpec("input_ids", ("tokens",), ("int32",)),
        TensorSpec("feed", ("tokens",), ("int32",)),
        TensorSpec("previous_tokens", ("max_rows",), ("int32",)),
    ),
    outputs=(TensorSpec("fed_ids", ("tokens",), ("int32",)),),
    attributes={},
)

# What a serving graph with these operators has beside the inputs and outputs of `plugins.paged_attention.schema`.
SAMPLING_INPUTS: dict[str, TensorSpec] = {spec.name: spec for spec in SAMPLE.inputs[1:]}
"""How each row of logits is to be sampled."""
FEED = "feed"
PREVIOUS_TOKENS = "previous_tokens"
"""Inputs: where each id comes from, and what the step before chose."""
GRAPH_INPUTS = (*SAMPLING_INPUTS, FEED, PREVIOUS_TOKENS)
TOKENS = "tokens"
"""Output [rows], int32."""

NO_TOKEN = -1
"""The token of a row without a finite best logit."""
