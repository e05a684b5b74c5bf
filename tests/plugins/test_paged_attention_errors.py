"""Malformed calls of the operator: an error that says what was found and expected, and nothing touched."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from plugins.paged_attention import schema
from plugins.paged_attention.reference import Attributes, Inputs

from .conftest import Case, Operator, Sequence

ATTRIBUTES = Attributes(num_heads=4, kv_num_heads=2, do_rotary=1)
CASE = Case(
    seed=2,
    sequences=(Sequence(1, 70), Sequence(9, 0), Sequence(3, 20)),
    attributes=ATTRIBUTES,
    head_dim=32,
    block_size=16,
    key_dtype="float32",
    value_dtype="float32",
    rotary_dim=32,
)
INPUTS = CASE.inputs()
QUANTIZED = replace(CASE, key_dtype="int8", value_dtype="int8").inputs()
BLOCKS = len(INPUTS.key_cache)


def changed(array: np.ndarray, index: int | tuple[int, int], value: int) -> np.ndarray:
    out = array.copy()
    out[index] = value
    return out


def cumulative(*values: int) -> Inputs:
    return replace(INPUTS, cumulative_sequence_length=np.array(values, np.int32))


MALFORMED: dict[str, tuple[Inputs, str]] = {
    "start": (cumulative(1, 1, 10, 13), "must start with 0: found 1"),
    "descending": (cumulative(0, 5, 4, 13), "must ascend: found 5 then 4 at sequence 1"),
    "beyond": (cumulative(0, 1, 14, 13), "must ascend: found 14 then 13 at sequence 2"),
    "huge": (cumulative(0, 2**31 - 1, 2**31 - 1, 13), "must ascend: found 2147483647 then 13 at sequence 2"),
    "end": (cumulative(0, 1, 10, 12), "must end with the number of tokens: found 12, expected 13"),
    "cumulative length": (cumulative(0, 1, 13), r"found \[3\], expected \[4\]"),
    "negative past": (
        replace(INPUTS, past_seqlens=changed(INPUTS.past_seqlens, 1, -1)),
        "past_seqlens must not be negative: found -1 at sequence 1",
    ),
    "huge past": (
        replace(INPUTS, past_seqlens=changed(INPUTS.past_seqlens, 1, 2**31 - 1)),
        r"block_table is too narrow for sequence 1: found 7 blocks of 16 positions, expected room for 2147483656",
    ),
    "narrow table": (
        replace(INPUTS, block_table=INPUTS.block_table[:, :4].copy()),
        "block_table is too narrow for sequence 0: found 4 blocks of 16 positions, expected room for 71",
    ),
    "no blocks": (replace(INPUTS, block_table=INPUTS.block_table[:, :0].copy()), "block_table is too narrow"),
    "block too large": (
        replace(INPUTS, block_table=changed(INPUTS.block_table, (0, 4), BLOCKS)),
        rf"block_table\[0, 4\] is out of range: found {BLOCKS}, expected 0 to {BLOCKS - 1}",
    ),
    "block -1": (
        replace(INPUTS, block_table=changed(INPUTS.block_table, (2, 0), -1)),
        r"block_table\[2, 0\] is out of range: found -1",
    ),
    "table rows": (
        replace(INPUTS, block_table=INPUTS.block_table[:2].copy()),
        r"block_table has the wrong shape: found \[2, 7\], expected \[3, 7\]",
    ),
    "slot too large": (
        replace(INPUTS, slot_mapping=changed(INPUTS.slot_mapping, 7, BLOCKS * 16)),
        rf"slot_mapping\[7\] is out of range: found {BLOCKS * 16}, expected -1 to {BLOCKS * 16 - 1}",
    ),
    "slot -2": (
        replace(INPUTS, slot_mapping=changed(INPUTS.slot_mapping, 0, -2)),
        r"slot_mapping\[0\] is out of range: found -2",
    ),
    "slots": (replace(INPUTS, slot_mapping=INPUTS.slot_mapping[:5].copy()), r"found \[5\], expected \[13\]"),
    "query width": (
        replace(INPUTS, query=INPUTS.query[:, :96].copy()),
        r"query has the wrong shape: found \[13, 96\], expected \[13, 128\]",
    ),
    "key width": (replace(INPUTS, key=INPUTS.key[:, :32].copy()), r"key has the wrong shape: found \[13, 32\]"),
    "value rows": (replace(INPUTS, value=INPUTS.value[:5].copy()), r"value has the wrong shape: found \[5, 64\]"),
    "key without value": (replace(INPUTS, value=None), "value is missing: expected key and value, or neither"),
    "value without key": (replace(INPUTS, key=None), "key is missing: expected key and value, or neither"),
    "packed width": (
        replace(INPUTS, key=None, value=None),
        r"query has the wrong shape: found \[13, 128\], expected \[13, 256\]",
    ),
    "query rank": (replace(INPUTS, query=INPUTS.query[None]), r"query has the wrong rank: found \[1, 13, 128\]"),
    "cache heads": (
        replace(INPUTS, key_cache=INPUTS.key_cache[:, :, :1].copy()),
        r"key_cache has the wrong shape: found \[\d+, 16, 1, 32\], expected \[\d+, 16, 2, 32\]",
    ),
    "cache rank": (replace(INPUTS, key_cache=INPUTS.key_cache[0]), "key_cache has the wrong rank"),
    "caches differ": (replace(INPUTS, value_cache=INPUTS.value_cache[1:].copy()), "value_cache has the wrong shape"),
    "empty blocks": (
        replace(INPUTS, key_cache=INPUTS.key_cache[:, :0].copy(), value_cache=INPUTS.value_cache[:, :0].copy()),
        "key_cache is empty",
    ),
    "scale without int8": (
        replace(INPUTS, k_scale=np.ones(INPUTS.key_cache.shape[:3], np.float32)),
        "k_scale is given, but key_cache is not int8: leave it out",
    ),
    "int8 without scale": (
        replace(QUANTIZED, v_scale=None),
        r"v_scale is missing: expected .blocks, block_size, kv_num_heads., because value_cache is int8",
    ),
    "scale shape": (
        replace(QUANTIZED, k_scale=QUANTIZED.k_scale[..., :1].copy()),
        r"k_scale has the wrong shape: found \[\d+, 16, 1\], expected \[\d+, 16, 2\]",
    ),
    "no cosines": (replace(INPUTS, cos_cache=None), "cos_cache is missing: expected .* do_rotary is 1"),
    "sines differ": (replace(INPUTS, sin_cache=INPUTS.sin_cache[:-1].copy()), "sin_cache has the wrong shape"),
    "short cosines": (
        replace(INPUTS, cos_cache=INPUTS.cos_cache[:70].copy(), sin_cache=INPUTS.sin_cache[:70].copy()),
        "cos_cache and sin_cache are too short for sequence 0: found 70 positions, expected at least 71",
    ),
    "wide cosines": (
        replace(INPUTS, cos_cache=np.ones((80, 17), np.float32), sin_cache=np.ones((80, 17), np.float32)),
        r"cos_cache has the wrong width: found \[80, 17\], expected 1 to 16 columns for a head size of 32",
    ),
}


@pytest.mark.parametrize("name", sorted(MALFORMED))
@pytest.mark.parametrize("run", [Operator.run, Operator.run_in_place])
def test_malformed_call_is_refused(operator: Operator, name: str, run: Callable[..., object]) -> None:
    inputs, message = MALFORMED[name]
    caches = inputs.key_cache.copy(), inputs.value_cache.copy()
    with pytest.raises(Exception, match=message):
        run(operator, inputs, ATTRIBUTES)
    assert inputs.key_cache.tobytes() == caches[0].tobytes()
    assert inputs.value_cache.tobytes() == caches[1].tobytes()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_heads": 5}, "must be a positive multiple of kv_num_heads: found num_heads 5, kv_num_heads 2"),
        ({"num_heads": 0}, "found num_heads 0"),
        ({"kv_num_heads": 0}, "kv_num_heads 0"),
        ({"kv_num_heads": -2}, "kv_num_heads -2"),
        ({"local_window_size": 0}, "local_window_size must be -1 or positive: found 0"),
        ({"softcap": -1.0}, "softcap must be 0 or positive: found -1"),
        ({"softcap": float("inf")}, "softcap must be 0 or positive: found inf"),
        ({"compute_dtype": 2}, "compute_dtype must be 0 .float32. or 1 .bfloat16.: found 2"),
        ({"scale": float("nan")}, "scale must be finite: found nan"),
        ({"scale": 1}, "attribute scale must be a float: found the integer 1"),
        ({"local_window_size": 8.0}, "attribute local_window_size must be an integer: found the float 8"),
    ],
)
def test_bad_attributes_are_refused_when_the_session_opens(
    operator: Operator, attributes: dict[str, float], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        operator.session(INPUTS, replace(ATTRIBUTES, **attributes))


@pytest.mark.parametrize("window", [20, 32, 53])
def test_blocks_before_the_window_may_be_gone(operator: Operator, window: int) -> None:
    """With a window, table entries of blocks that no new token sees are not looked at."""
    attributes = replace(ATTRIBUTES, local_window_size=window)
    gone = (71 - window) // 16  # whole blocks before the first position seen
    table = INPUTS.block_table.copy()
    table[0, :gone] = -1
    inputs = replace(INPUTS, block_table=table)
    with_hole = operator.run(inputs, attributes)[0]
    assert with_hole.tobytes() == operator.run(INPUTS, attributes)[0].tobytes()
    table[0, gone] = -1
    with pytest.raises(Exception, match=rf"block_table\[0, {gone}\] is out of range"):
        operator.run(inputs, attributes)


def test_a_sequence_without_new_tokens_is_not_looked_at(operator: Operator) -> None:
    inputs = replace(
        INPUTS,
        cumulative_sequence_length=np.array([0, 0, 9, 9], np.int32),
        past_seqlens=np.array([-7, 0, 2**31 - 1], np.int32),
        block_table=np.where(np.arange(3)[:, None] == 1, INPUTS.block_table, -1).astype(np.int32),
        **{name: getattr(INPUTS, name)[1:10].copy() for name in ("query", "key", "value", "slot_mapping")},
    )
    assert np.isfinite(operator.run(inputs, ATTRIBUTES)[0]).all()


def test_left_out_attributes_have_their_defaults(operator: Operator) -> None:
    """A graph need not spell out what it does not use."""
    inputs = replace(INPUTS, cos_cache=None, sin_cache=None)
    spelled_out = Attributes(num_heads=4, kv_num_heads=2)
    sparse = operator.run(inputs, spelled_out, leave_out=tuple(schema.ATTRIBUTES)[2:])
    assert sparse[0].tobytes() == operator.run(inputs, spelled_out)[0].tobytes()
