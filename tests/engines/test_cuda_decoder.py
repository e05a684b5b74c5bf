"""The CUDA decoder over a stand-in device in host memory: ladder, padding, packing, moves, errors; no GPU needed."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.backends.cuda_decoder import CudaDecoder
from engines.backends.cuda_graphs import is_decode_step, ladder_up_to
from engines.backends.cuda_staging import Array, Layout
from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from plugins.cuda_runtime import OutOfDeviceMemoryError
from plugins.errors import KilnError

from .cuda_steps import ints, one_more, prompt
from .host_runtime import HostRuntime

BLOCKS = 12


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model()


@pytest.fixture
def decoder(model, cpu_plugin) -> Iterator[Callable[..., CudaDecoder]]:
    made = []

    def make(blocks: int | None = BLOCKS, **options) -> CudaDecoder:
        options = {"plugins": [cpu_plugin], "max_context": model.max_context, "runtime": HostRuntime(), **options}
        made.append(CudaDecoder(model.path, model.kv, blocks, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def caches_of(backend: CudaDecoder, runtime: HostRuntime) -> bytes:
    size = backend.num_blocks * backend.kv.bytes_per_block // len(backend.cache_addresses)
    return b"".join(bytes(runtime.live[address])[:size] for address in backend.cache_addresses.values())


def test_prompt_and_decode_equal_the_model(decoder, model) -> None:
    """Also with batches between the ladder's sizes, whose padding must not show."""
    texts = [[3, 14, 15, 9, 26], [5, 35, 8], [8, 9, 7, 9, 3, 23, 8, 46, 26]]
    blocks, size = [[2], [7], [4, 1]], model.block_size
    backend = decoder(ladder=(1, 2, 4))
    for text, own in zip(texts, blocks, strict=True):
        found = backend.step(prompt(text[:-1], own, size))
        np.testing.assert_allclose(found, model.logits(text[:-1]), rtol=1e-4, atol=1e-4)
    step = one_more([text[-1] for text in texts], [len(text) - 1 for text in texts], blocks, size)
    found = backend.step(step)
    for row, text in zip(found, texts, strict=True):
        np.testing.assert_allclose(row, model.logits(text)[-1], rtol=1e-4, atol=1e-4)
    assert len(backend._runtime.launched) == 1, "prompts without a graph, the decode step with one"


def test_inputs_that_are_read_on_the_host_are_bound_there(decoder, model) -> None:
    """Nothing reaches the device any more, so that its copy is that of the step before."""
    backend = decoder()
    backend._session._host_inputs = {"input_ids"}
    backend.step(prompt([1, 2, 3], [5], model.block_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend._staging, "send", lambda *arguments: None)
        found = backend.step(prompt([3, 14, 9], [5], model.block_size))
    np.testing.assert_allclose(found, model.logits([3, 14, 9]), rtol=1e-4, atol=1e-4)


def test_padding_writes_nowhere(decoder, model) -> None:
    runtime = HostRuntime()
    backend = decoder(ladder=(8,), runtime=runtime)
    backend.step(prompt(list(range(1, 21)), [3, 0, 5], model.block_size))
    before = caches_of(backend, runtime)
    nowhere = replace(one_more([4], [20], [[3, 0, 5]], model.block_size), slot_mapping=ints(-1))
    backend.step(nowhere)
    assert runtime.launched
    assert caches_of(backend, runtime) == before


@pytest.mark.parametrize("ladder", [(), (1, 2, 4, 8), (3,)])
def test_engine_gives_the_same_tokens(decoder, model, tiny_bundle, ladder) -> None:
    """Mixed batches, more requests than places, one cancelled: as the engine on the CPU backend."""
    config = SchedulerConfig(max_running=5, tokens_per_step=16)
    prompts = [[int(t) for t in np.random.default_rng(n).integers(1, 61, 3 + 5 * n)] for n in range(8)]
    requests = [Request(tokens, SamplingParams(max_tokens=12, ignore_eos=True)) for tokens in prompts]

    def answers(engine: Engine) -> list[tuple[int, ...]]:
        streams = [engine.submit(request) for request in requests]
        given_up = engine.submit(Request(prompts[3], SamplingParams(max_tokens=100, ignore_eos=True)))
        given_up.cancel()
        return [tuple(stream.result().token_ids) for stream in streams]

    with Engine.open(tiny_bundle.path, config=config) as engine:
        expected = answers(engine)
    backend = decoder(40, ladder=ladder)
    with Engine.from_decoder(backend, model.decoder, None, config) as engine:
        assert answers(engine) == expected
    assert bool(backend.ladder) == bool(ladder)


def test_blocks_move_between_device_and_host(decoder, model) -> None:
    size, text = model.block_size, list(range(1, 14))
    backend = decoder(host_blocks=2, ladder=(1,))
    backend.step(prompt(text, [0, 1], size))
    backend.move_blocks([(0, BLOCKS), (1, BLOCKS + 1), (5, 0), (6, 1), (BLOCKS, 9), (BLOCKS + 1, 7)])
    found = backend.step(one_more([40], [13], [[9, 7]], size))
    np.testing.assert_allclose(found[0], model.logits([*text, 40])[-1], rtol=1e-4, atol=1e-4)


def test_a_step_without_rows_gives_none(decoder, model) -> None:
    backend = decoder(ladder=(1,))
    step = prompt([1, 2, 3], [0], model.block_size)
    assert backend.step(replace(step, logits_indices=ints())).shape == (0, model.vocabulary)


def test_steps_larger_than_their_areas_grow_them(decoder, model) -> None:
    backend = decoder(ladder=(1,))
    step = prompt([1, 2, 3], [0], model.block_size)
    wide = np.zeros((1, 1 << 19), np.int32)  # 2 MiB
    expected = backend.step(step)
    np.testing.assert_array_equal(backend.step(replace(step, block_table=wide)), expected)


def test_automatic_cache_takes_what_fits_and_leaves_a_reserve(decoder, model) -> None:
    room = 1 << 26
    backend = decoder(None, most_blocks=10**9, runtime=HostRuntime(room))
    assert 0 < backend.num_blocks * model.kv.bytes_per_block <= 0.9 * room
    assert decoder(None, most_blocks=3).num_blocks == 3
    with pytest.raises(KilnError, match="not one cache block"):
        decoder(None, most_blocks=9, runtime=HostRuntime(64))


def test_short_memory_says_what_was_asked_for_and_leaves_nothing(decoder) -> None:
    runtime = HostRuntime(1 << 16)
    with pytest.raises(KilnError, match=r"key_cache\.0.* a cache of 999 blocks.*lower kv_blocks"):
        decoder(999, runtime=runtime)
    assert not runtime.live
    assert runtime.closed


def test_closing_gives_all_memory_back(decoder, model) -> None:
    runtime = HostRuntime()
    backend = decoder(ladder=(1, 2), host_blocks=2, runtime=runtime)
    backend.step(prompt([1, 2, 3], [0], model.block_size))
    backend.close()
    backend.close()
    assert not runtime.live
    assert not runtime.graphs
    assert runtime.closed
    with pytest.raises(RuntimeError, match="closed"):
        backend.step(prompt([1], [0], model.block_size))


def test_no_blocks_are_refused(decoder) -> None:
    with pytest.raises(KilnError, match="0 blocks"):
        decoder(0)


def test_decode_steps_are_told_apart(model) -> None:
    step = one_more([1, 2], [4, 5], [[0], [1]], model.block_size)
    assert is_decode_step(step)
    assert not is_decode_step(replace(step, logits_indices=ints(1, 0)))
    assert not is_decode_step(replace(step, logits_indices=ints(1)))
    assert not is_decode_step(prompt([1, 2], [0], model.block_size))


@given(st.integers(1, 2000))
def test_ladder_wastes_little(most: int) -> None:
    sizes = ladder_up_to(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    assert sizes[0] == 1
    assert all(after - before <= max(before, 4) for before, after in itertools.pairwise(sizes))


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["int32", "float32", "int64"])), max_size=8))
def test_layout_keeps_arrays_apart_and_aligned(arrays: list[tuple[int, str]]) -> None:
    layout = Layout({f"a{n}": Array((size,), dtype) for n, (size, dtype) in enumerate(arrays)})
    area = np.zeros(layout.size, np.uint8)
    views = layout.views(area)
    for number, view in enumerate(views.values(), 1):
        view[...] = number
    for number, (view, (size, dtype)) in enumerate(zip(views.values(), arrays, strict=True), 1):
        assert view.shape == (size,)
        assert view.dtype == dtype
        assert (view == number).all()
    assert all(offset % 64 == 0 for offset in layout.offsets.values())


class Short(HostRuntime):
    """Refuses memory at the n-th allocation, counted from when `left` is set."""

    left: int | None = None

    def allocate(self, size: int, what: str) -> int:
        if self.left is not None:
            if self.left == 0:
                raise OutOfDeviceMemoryError(f"{what} needs {size} bytes")
            self.left -= 1
        return super().allocate(size, what)

    def allocate_host(self, size: int, what: str) -> int:
        return self.allocate(size, what)


@pytest.mark.parametrize("left", range(0, 22, 3))
def test_memory_that_runs_out_while_opening_is_all_given_back(decoder, left: int) -> None:
    runtime = Short()
    runtime.left = left
    with suppress(KilnError):  # with the last of them there is enough
        decoder(ladder=(1, 2), host_blocks=1, runtime=runtime).close()
    assert not runtime.live
    assert not runtime.graphs
    assert runtime.closed


def test_a_step_for_which_memory_is_short_leaves_the_others_possible(decoder, model) -> None:
    runtime = Short()
    backend = decoder(ladder=(1,), runtime=runtime)
    step = prompt([1, 2, 3], [0], model.block_size)
    expected = backend.step(step)
    wide = replace(step, block_table=np.zeros((1, 1 << 19), np.int32))
    for left in range(3):
        runtime.left = left
        with pytest.raises(KilnError, match="a step's inputs needs"):
            backend.step(wide)
        runtime.left = None
        np.testing.assert_array_equal(backend.step(step), expected)
    np.testing.assert_array_equal(backend.step(wide), expected)
