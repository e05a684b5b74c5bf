"""`Engine`: an opened bundle that answers requests. Brings bundle, backend, tokenizer and worker together.

Decoders take `submit` and `generate`; models without a KV cache take `infer`.
"""

import time
import weakref
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from numpy.typing import NDArray

from engines.backends.base import DecoderBackend, InferBackend
from engines.bundle import open_bundle
from engines.runtime.answer import Answer
from engines.runtime.batch_queue import BatchingConfig
from engines.runtime.batcher import BatchWorker
from engines.runtime.guidance import Guide, GuideCompiler
from engines.runtime.info import EngineInfo
from engines.runtime.memory_metrics import expose_memory
from engines.runtime.metrics import EngineMetrics
from engines.runtime.opening import (
    check_plugins,
    decoder_backend,
    default_batching,
    default_config,
    info_from_bundle,
    kv_cache,
    model_backend,
)
from engines.runtime.prefix_cache import salt_of_tenant
from engines.runtime.request import Completion, Guidance, Request, SamplingParams
from engines.runtime.sampler import device_seed, generator_from_seed
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.sequence import Lane, Sequence
from engines.runtime.speculation import PromptLookup
from engines.runtime.stream import Stream
from engines.runtime.tokenizer import Tokenizer
from engines.runtime.worker import DecodeWorker
from passes.onnx_model import DecoderSpec
from plugins.errors import KilnError


class Engine:
    """Answers requests until `close`. All methods may be called from any thread.

    Made by `open` from a bundle, or by `from_decoder` and `from_model` from backends, which it then owns.
    """

    def __init__(
        self,
        *,
        decoder: DecoderSpec | None = None,
        worker: DecodeWorker | None = None,
        batcher: BatchWorker | None = None,
        tokenizer: Tokenizer | None = None,
        info: EngineInfo,
        metrics: EngineMetrics,
    ) -> None:
        self._decoder = decoder
        self._worker = worker
        self._batcher = batcher
        self._tokenizer = tokenizer
        self._guides: GuideCompiler | None = None
        if tokenizer is not None and decoder is not None:
            self._guides = GuideCompiler(tokenizer, decoder.vocab_size, decoder.eos_token_ids)
        self.info = info
        self.metrics = metrics
        # Also runs when the engine is forgotten or the interpreter exits, so that no step outlives its session.
        self._finalizer = weakref.finalize(self, _close, worker, batcher)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        name: str | None = None,
        kv: Literal["paged", "static"] = "paged",
        kv_blocks: int | None = None,
        swap_blocks: int = 0,
        window: int | None = None,
        config: SchedulerConfig | None = None,
        batching: BatchingConfig | None = None,
        threads: int | None = None,
    ) -> "Engine":
        """Verify a bundle and open it.

        Args:
            name: what it calls itself, in metrics too; by default the bundle's model.
            kv: `paged` shares blocks between requests; `static` gives each of `config.max_running` places a ring of its
                own, in which the oldest tokens are overwritten: a request attends to its last `window` tokens only.
            kv_blocks: blocks in the paged cache; by default what `config.max_running` full contexts need, at most a
                quarter of the host's memory. Pages are committed only when they are first used.
            swap_blocks: blocks of host memory to which a request that gives way takes its content along.
            window: tokens that the static cache keeps; by default the model's context.
            config: how requests share the engine: places, tokens a step, lanes, prefixes, queue; by default what
                `kiln tune` wrote into the bundle, if it did.
            batching: the same for a model without a KV cache: rows of a batch, waiting, buckets, lanes, queue.
            threads: threads of one step; None uses every CPU that this process may run on.

        Raises KilnError (BundleError) when the bundle does not verify or cannot run here.
        """
        bundle = open_bundle(Path(path))
        manifest = bundle.manifest
        check_plugins(bundle)
        tokenizer = Tokenizer(bundle.tokenizer_path) if bundle.tokenizer_path else None
        if manifest.decoder is None:
            model = model_backend(bundle, threads)
            engine = cls.from_model(model, info_from_bundle(bundle, name), batching or default_batching(manifest))
            expose_memory(engine.metrics, bundle)
            return engine
        if config is None:
            config = default_config(manifest)
            if kv == "paged" and kv_blocks is None and manifest.serving is not None:
                kv_blocks = manifest.serving.kv_blocks
        decoder = manifest.decoder
        if kv == "static":
            window = decoder.max_context if window is None else window
        elif window is not None:
            raise KilnError(f"window is {window}, which belongs to the static cache; open with kv='static'")
        backend = decoder_backend(bundle, decoder, config, kv_blocks, swap_blocks, window, threads)
        engine = cls.from_decoder(
            backend, decoder, tokenizer, config, window=window, info=info_from_bundle(bundle, name)
        )
        cache = engine._require_worker().kv  # not the engine itself, which ends when it is forgotten
        expose_memory(engine.metrics, bundle, backend, lambda: cache.held)
        return engine

    @classmethod
    def from_decoder(
        cls,
        backend: DecoderBackend,
        decoder: DecoderSpec,
        tokenizer: Tokenizer | None = None,
        config: SchedulerConfig | None = None,
        *,
        window: int | None = None,
        info: EngineInfo | None = None,
    ) -> "Engine":
        """An engine over a decoder backend; without a tokenizer it takes and gives token ids only.

        With `window`, which the backend must have been made with, the cache is static.
        """
        config = config or SchedulerConfig()
        kv = kv_cache(backend, decoder, config, window)
        info = replace(
            info or EngineInfo("model", "decoder"),
            max_length=kv.longest(decoder.max_context),
            vocab_size=decoder.vocab_size,
            block_size=backend.kv.block_size,
            num_blocks=backend.num_blocks,
        )
        metrics = EngineMetrics(info.name)
        worker = DecodeWorker(backend, kv, config, metrics)
        return cls(decoder=decoder, worker=worker, tokenizer=tokenizer, info=info, metrics=metrics)

    @classmethod
    def from_model(
        cls, model: InferBackend, info: EngineInfo | None = None, batching: BatchingConfig | None = None
    ) -> "Engine":
        """An engine over a backend for models without a KV cache."""
        info = replace(info or EngineInfo("model", "model"), inputs=model.inputs, outputs=model.outputs)
        metrics = EngineMetrics(info.name)
        return cls(
            batcher=BatchWorker(model, batching or BatchingConfig(), metrics, info.name), info=info, metrics=metrics
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises KilnError when the bundle has none."""
        if self._tokenizer is None:
            raise KilnError(f"{self.info.name} has no tokenizer; give token ids instead of text")
        return self._tokenizer

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the engine by itself, a bug: it answers nothing any more and must be opened again."""
        worker = self._worker or self._batcher
        return None if worker is None else worker.failure

    @property
    def backend(self) -> DecoderBackend:
        """The decoder backend, for measurements and `score`; to be used only while no request is outstanding."""
        return self._require_worker().backend

    @property
    def max_length(self) -> int:
        """Most tokens of one request, prompt and answer together: the model's context, or the cache if smaller."""
        self._require_worker()
        return self.info.max_length

    @property
    def free_blocks(self) -> int:
        """Cache blocks that no request holds; all of them when nothing runs."""
        kv = self._require_worker().kv
        return kv.free + kv.cached

    def submit(self, request: Request) -> Stream:
        """Queue a request for one answer and return at once.

        Raises KilnError when it asks for several answers (`submit_choices` gives those), when its prompt is empty, has
        unknown tokens, or leaves no room in `max_length`, when it needs a tokenizer that is not there, or when the
        engine is closed; QueueFullError when too many wait.
        """
        if request.sampling.n != 1:
            raise KilnError(f"the request asks for {request.sampling.n} answers; use submit_choices")
        return self.submit_choices(request)[0]

    def submit_choices(self, request: Request) -> list[Stream]:
        """Queue a request and return one stream for each of its `sampling.n` answers. Raises as `submit`."""
        return self._submit(request, self._token_ids(request))

    def generate(
        self, prompts: Iterable[str | SequenceOf[int] | Request], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Run prompts together and wait for all; `sampling` is for those that are no Request.

        The completions come in the order of the prompts, `sampling.n` for each.

        Raises what `submit` raises before anything runs, and RequestError when one fails; the others are cancelled.
        """
        default = sampling or SamplingParams()
        if isinstance(prompts, str):
            raise KilnError("generate takes a list of prompts, found one text; write generate([prompt])")
        requests = [p if isinstance(p, Request) else Request(_prompt(p), default) for p in prompts]
        encoded = [self._token_ids(request) for request in requests]
        streams: list[Stream] = []
        try:
            for request, token_ids in zip(requests, encoded, strict=True):
                streams.extend(self._submit(request, token_ids))
            return [stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.cancel()

    def infer(
        self, inputs: Mapping[str, NDArray], *, lane: Lane = "interactive", timeout: float | None = None
    ) -> dict[str, NDArray]:
        """Run a model without a KV cache; outputs by the graph's names, for the rows of these inputs.

        Requests of other threads may run in the same batch; results depend on them by rounding only.
        Raises KilnError on wrong inputs, QueueFullError when too many wait, TimeoutError after `timeout` seconds.
        """
        return self.submit_infer(inputs, lane=lane, timeout=timeout).result()

    def submit_infer(
        self, inputs: Mapping[str, NDArray], *, lane: Lane = "interactive", timeout: float | None = None
    ) -> "Future[dict[str, NDArray]]":
        """Like `infer`, but returns at once; cancelling the future takes the request out of the queue.

        The arrays must stay as they are until the future is done. Wrong inputs and a full queue raise here, the rest is
        raised by the future.
        """
        if self._batcher is None:
            raise KilnError(f"{self.info.name} is a language model with a KV cache; use submit or generate, not infer")
        self._require_open()
        return self._batcher.submit(inputs, lane, timeout)

    def close(self) -> None:
        """Cancel outstanding requests, each of which gets its outcome, and free everything; may be called again."""
        self._finalizer()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, request: Request, token_ids: list[int]) -> list[Stream]:
        worker = self._require_worker()
        guide = self._guide(request.sampling.guidance)
        first, *first.forks = (
            self._answer(worker, request, token_ids, choice, guide) for choice in range(request.sampling.n)
        )
        worker.submit(first)
        return [answer.stream for answer in (first, *first.forks)]

    def _guide(self, guidance: Guidance | None) -> Guide | None:
        if guidance is None:
            return None
        if self._guides is None:
            raise KilnError(f"{self.info.name} has no tokenizer, so answers cannot be guided; leave guidance out")
        return self._guides.compile(guidance)

    def _answer(
        self, worker: DecodeWorker, request: Request, token_ids: list[int], choice: int, guide: Guide | None
    ) -> Answer:
        sampling, now = request.sampling, time.monotonic()
        room = self.max_length - len(token_ids)
        sequence = Sequence(
            worker.new_id(),
            token_ids,
            room if sampling.max_tokens is None else min(room, sampling.max_tokens),
            lane=request.lane,
            arrival=now,
            deadline=None if request.timeout is None else now + request.timeout,
            salt=salt_of_tenant(request.tenant),
        )
        assert self._decoder is not None
        return Answer(
            sequence,
            sampling,
            generator_from_seed(sampling.seed, choice),
            Stream(len(token_ids), lambda: worker.cancel(sequence.id)),
            device_seed(sampling.seed, choice),
            eos=frozenset() if sampling.ignore_eos else frozenset(self._decoder.eos_token_ids),
            guide=None if guide is None else guide.start(),
            lookup=PromptLookup(worker.speculate) if worker.speculate else None,
            text=None if self._tokenizer is None else self._tokenizer.text_stream(token_ids, sampling.stop),
        )

    def _token_ids(self, request: Request) -> list[int]:
        """The request's prompt as checked token ids."""
        self._require_worker()
        if request.sampling.stop and self._tokenizer is None:
            raise KilnError(f"{self.info.name} has no tokenizer, so stop strings cannot be found; leave stop out")
        prompt = request.prompt
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise KilnError("the prompt is empty; expected at least one token")
        if len(token_ids) >= self.max_length:
            raise KilnError(
                f"the prompt has {len(token_ids)} tokens, the engine holds {self.max_length} of prompt and answer "
                f"together; shorten the prompt to at most {self.max_length - 1}"
                + ("" if self._context_is_limit else ", or open the engine with more kv_blocks")
            )
        assert self._decoder is not None
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < self._decoder.vocab_size:
                raise KilnError(f"the prompt has token id {token}; expected 0 to {self._decoder.vocab_size - 1}")
        return token_ids

    @property
    def _context_is_limit(self) -> bool:
        return self._decoder is not None and self.max_length == self._decoder.max_context

    def _require_worker(self) -> DecodeWorker:
        if self._worker is None:
            raise KilnError(f"{self.info.name} has no KV cache and generates no tokens; use infer")
        self._require_open()
        return self._worker

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise KilnError(f"the engine of {self.info.name} is closed; open it again")


def _prompt(prompt: str | SequenceOf[int]) -> str | tuple[int, ...]:
    return prompt if isinstance(prompt, str) else tuple(prompt)


def _close(worker: DecodeWorker | None, batcher: BatchWorker | None) -> None:
    if worker is not None:
        worker.close()
    if batcher is not None:
        batcher.close()
