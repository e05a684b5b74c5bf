"""An engine of this process under random use from several threads: whole answers, streams, cancellations, deadlines,
several answers to a prompt, guided ones, prompts with a common beginning, nonsense; with too few blocks for all."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engines.runtime.engine import Engine
from engines.runtime.request import Guidance, Request, RequestError, SamplingParams
from engines.runtime.scheduler import QueueFullError, SchedulerConfig
from engines.runtime.stream import Stream
from plugins.errors import KilnError
from soaking.outcomes import Outcomes

THREADS = 12
RUNNING = 8
OUTCOME_SECONDS = 300
"""In which every request must have its outcome. Thousands of times what one takes."""
SETTLE_SECONDS = 60


class EngineSoak:
    """Uses an engine until `run` is told to end. `engine` is closed by the caller.

    `longest` bounds prompts, in tokens. While `shortages`, requests may fail for lack of memory.
    """

    def __init__(
        self,
        bundle: Path,
        outcomes: Outcomes,
        seed: int,
        kv_blocks: int | None,
        *,
        tokens_per_step: int = 64,
        speculate: int = 3,
        longest: int = 200,
    ) -> None:
        config = SchedulerConfig(RUNNING, tokens_per_step, max_waiting=3 * RUNNING, headroom=0.0, speculate=speculate)
        blocks = kv_blocks or tight_blocks(bundle, longest)
        self.shortages = False
        self.engine = Engine.open(bundle, kv_blocks=blocks, swap_blocks=blocks // 2, config=config)
        self._outcomes = outcomes
        self._seed = seed
        self._longest = min(self.engine.max_length - 1, longest)
        self._shared = self._tokens(random.Random(seed), self._longest // 2)
        self._doing = {
            self._whole: 6,
            self._streamed: 4,
            self._cancelled: 4,
            self._abandoned: 3,
            self._late: 2,
            self._several: 3,
            self._guided: 1 if self._can_guide() else 0,
            self._nonsense: 3,
        }

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=self._use, args=(number, end)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @property
    def blocks_away(self) -> int:
        return self.engine.info.num_blocks - self.engine.free_blocks

    @property
    def preemptions(self) -> int:
        return int(self._count("kiln_preemptions_total"))

    def _count(self, name: str) -> float:
        samples = (sample for family in self.engine.metrics.families() for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == name)

    def _can_guide(self) -> bool:
        """Whether the bundle has a tokenizer that guidance understands."""
        try:
            self.engine.generate([Request((1,), SamplingParams(max_tokens=1, guidance=Guidance("regex", "A")))])
        except KilnError:
            return False
        return True

    def _use(self, number: int, end: float) -> None:
        generator = random.Random(f"{self._seed} {number}")
        while time.monotonic() < end:
            (do,) = generator.choices(list(self._doing), list(self._doing.values()))
            kind = do.__name__.strip("_")
            try:
                do(kind, generator)
            except QueueFullError:
                generator.random()  # refused before it began
            except Exception as error:
                self._outcomes.fault(f"{kind}: {error!r}")

    def _tokens(self, generator: random.Random, count: int) -> tuple[int, ...]:
        return tuple(generator.randrange(self.engine.info.vocab_size) for _ in range(count))

    def _request(self, generator: random.Random, **sampling: object) -> Request:
        own = self._tokens(generator, generator.randint(1, self._longest // 2))
        prompt = self._shared[: generator.randrange(len(self._shared))] + own if generator.random() < 0.5 else own
        params = {
            "max_tokens": generator.randint(1, 60),
            "temperature": generator.choice((0.0, 1.0)),
            "logprobs": generator.choice((None, None, None, 3)),
            "ignore_eos": generator.random() < 0.5,
            **sampling,
        }
        lane = generator.choice(("interactive", "batch"))
        return Request(prompt, SamplingParams(**params), lane, tenant=generator.choice(("", "other")))

    def _submit(self, kind: str, request: Request) -> list[Stream]:
        streams = self.engine.submit_choices(request)
        self._outcomes.begin(kind, len(streams))
        return streams

    def _settle(self, kind: str, streams: list[Stream], expected: tuple[str, ...]) -> None:
        for stream in streams:
            try:
                reason = stream.result(OUTCOME_SECONDS).finish_reason
            except (RequestError, TimeoutError) as error:
                if self.shortages and "memory" in str(error.__cause__):
                    self._outcomes.end(kind, "no memory")
                else:
                    self._outcomes.end(kind, repr(error), expected=False)
            else:
                self._outcomes.end(kind, reason, reason in expected)

    def _whole(self, kind: str, generator: random.Random) -> None:
        self._settle(kind, self._submit(kind, self._request(generator)), ("stop", "length"))

    def _streamed(self, kind: str, generator: random.Random) -> None:
        streams = self._submit(kind, self._request(generator))
        for stream in streams:
            with suppress(RequestError):  # which its result raises, too
                count = sum(len(chunk.token_ids) for chunk in stream)
                if count != len(stream.result(OUTCOME_SECONDS).token_ids):
                    self._outcomes.fault(f"{kind}: the chunks hold {count} tokens, the result another number")
        self._settle(kind, streams, ("stop", "length"))

    def _cancelled(self, kind: str, generator: random.Random) -> None:
        streams = self._submit(kind, self._request(generator, n=generator.choice((1, 1, 3))))
        for stream in streams:
            with suppress(RequestError):  # which its result raises, too
                for _, _chunk in zip(range(generator.randint(1, 10)), stream, strict=False):
                    pass
            stream.cancel()
        self._settle(kind, streams, ("stop", "length", "cancelled"))

    def _abandoned(self, kind: str, generator: random.Random) -> None:
        """Cancelled at once, and never read."""
        streams = self._submit(kind, self._request(generator, n=generator.choice((1, 2))))
        for stream in streams:
            stream.cancel()
        self._settle(kind, streams, ("stop", "length", "cancelled"))

    def _late(self, kind: str, generator: random.Random) -> None:
        request = self._request(generator)
        timeout = 10 ** generator.uniform(-4, -0.5)
        late = Request(request.prompt, request.sampling, request.lane, timeout)
        self._settle(kind, self._submit(kind, late), ("stop", "length", "timeout"))

    def _several(self, kind: str, generator: random.Random) -> None:
        request = self._request(generator, n=generator.randint(2, RUNNING), temperature=1.0, seed=1)
        self._settle(kind, self._submit(kind, request), ("stop", "length"))

    def _guided(self, kind: str, generator: random.Random) -> None:
        guidance = generator.choice((Guidance("regex", "[A-D]{1,20}"), Guidance("choices", ("A", "BC", "DDD"))))
        request = self._request(generator, guidance=guidance, ignore_eos=False)
        self._settle(kind, self._submit(kind, request), ("stop", "length"))

    def _nonsense(self, kind: str, generator: random.Random) -> None:
        """Refused before it is queued."""
        make = generator.choice(
            (
                lambda: Request(()),
                lambda: Request((-1,)),
                lambda: Request((self.engine.info.vocab_size,)),
                lambda: Request((1,) * self.engine.max_length),
                lambda: Request((1,), lane="express"),
                lambda: Request((1,), SamplingParams(temperature=float("nan"))),
                lambda: Request((1,), SamplingParams(n=1000)),
                lambda: Request((1,), SamplingParams(max_tokens=0)),
                lambda: Request((1,), timeout=-1),
                lambda: Request((1,), SamplingParams(guidance=Guidance("regex", "(["))),
            )
        )
        self._outcomes.begin(kind)
        try:
            streams = self.engine.submit_choices(make())
        except QueueFullError:
            self._outcomes.end(kind, "queue full")
        except KilnError:
            self._outcomes.end(kind, "refused")
        else:
            self._outcomes.end(kind, "accepted", expected=False)
            for stream in streams:
                stream.cancel()


def settled(away: Callable[[], int]) -> int:
    """Blocks that are not home a while after the last request: those of clients that left are found out soon."""
    end = time.monotonic() + SETTLE_SECONDS
    while (left := away()) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def tight_blocks(bundle: Path, longest: int = 200) -> int:
    """Blocks for three requests of the longest prompts, where eight may run."""
    from engines.bundle import open_bundle

    decoder = open_bundle(bundle).manifest.decoder
    if decoder is None:
        raise SystemExit(f"{bundle} is no decoder; expected a bundle of a language model")
    return 3 * ((longest + 60) // decoder.kv.block_size + 1)
