"""Who answers: an OpenAI-compatible server, or a bundle opened in this very process.

Knows nothing of arrival times or statistics. A target calls `deliver` at each arrival of new tokens, so that whoever
measures reads the clock, and raises LoadError with a kind that errors are counted by.
"""

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engines.runtime.engine import Engine
from engines.runtime.request import Request, RequestError, SamplingParams
from engines.runtime.scheduler import QueueFullError, SchedulerConfig
from engines.runtime.sequence import Lane
from plugins.errors import KilnError

if TYPE_CHECKING:
    import httpx

Messages = tuple[Mapping[str, str], ...]
Deliver = Callable[[], None]

DEFAULT_VOCABULARY = 1000
"""Random tokens stay below this where a server does not tell its vocabulary: every model knows so many."""
_CONNECT_SECONDS = 10.0


class LoadError(Exception):
    """A request that got no whole answer. `kind` is a few words, the same for all errors of one sort."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class LoadRequest:
    """One request, ready to send: token ids, text, or messages of a conversation."""

    prompt: tuple[int, ...] | str | Messages
    output_tokens: int
    lane: Lane = "interactive"

    @property
    def is_chat(self) -> bool:
        return bool(self.prompt) and isinstance(self.prompt[0], Mapping)


@dataclass(frozen=True)
class Usage:
    """Tokens as the target counts them; None where it does not say."""

    prompt_tokens: int | None
    output_tokens: int | None


class Target(Protocol):
    """Answers requests, many at a time, on one event loop."""

    name: str
    vocabulary: int

    async def answer(self, request: LoadRequest, deliver: Deliver) -> Usage:
        """Send a request and return at its end. Cancelling the call ends the request. Raises LoadError."""
        ...

    async def close(self) -> None: ...


class BundleTarget:
    """An engine of this process, which the target owns."""

    def __init__(self, engine: Engine) -> None:
        if engine.info.kind != "decoder":
            engine.close()
            raise KilnError(f"{engine.info.name} generates no tokens; kiln load takes a language model")
        self._engine = engine
        self.name = engine.info.name
        self.vocabulary = engine.info.vocab_size

    @classmethod
    def open(
        cls, path: Path, threads: int | None, config: SchedulerConfig | None = None, kv_blocks: int | None = None
    ) -> "BundleTarget":
        """Raises KilnError for what is no bundle of a language model."""
        return cls(Engine.open(path, threads=threads, config=config, kv_blocks=kv_blocks))

    async def answer(self, request: LoadRequest, deliver: Deliver) -> Usage:
        sampling = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
        count = 0
        try:
            prompt: Any = request.prompt
            if request.is_chat:
                prompt = tuple(self._engine.tokenizer.chat_prompt([dict(message) for message in prompt]))
            elif isinstance(prompt, str):
                prompt = tuple(self._engine.tokenizer.encode(prompt))
            stream = self._engine.submit(Request(prompt, sampling, request.lane))
            try:
                async for chunk in stream:
                    if chunk.token_ids:
                        count += len(chunk.token_ids)
                        deliver()
            finally:
                stream.cancel()
        except QueueFullError as error:
            raise LoadError("queue full", str(error)) from error
        except RequestError as error:
            raise LoadError("failed", str(error)) from error
        except KilnError as error:
            raise LoadError("refused", str(error)) from error
        return Usage(len(prompt), count)

    async def close(self) -> None:
        self._engine.close()


class UrlTarget:
    """An OpenAI-compatible server: `/v1/completions` with token ids, `/v1/chat/completions` with messages.

    Sends `ignore_eos`, and `lane` where it is not the default: common additions to the API that Kiln's server has.
    """

    def __init__(self, url: str, client: "httpx.AsyncClient", name: str, vocabulary: int) -> None:
        self._url = url
        self._client = client
        self.name = name
        self.vocabulary = vocabulary

    @classmethod
    async def connect(
        cls, url: str, *, api_key: str | None = None, model: str | None = None, vocabulary: int | None = None
    ) -> "UrlTarget":
        """Ask the server what it serves. Raises KilnError where it cannot be reached, or serves several models."""
        try:
            import httpx
        except ImportError as error:
            raise KilnError(f"cannot import httpx ({error}); install it: pip install 'kiln-engine[serve]'") from error

        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # Reading may take as long as the whole request may; the number of connections is the load's business.
        client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        root = url.rstrip("/").removesuffix("/v1")
        try:
            name, told = await _served_model(client, root, model)
        except BaseException:
            await client.aclose()
            raise
        return cls(root, client, name, vocabulary or told or DEFAULT_VOCABULARY)

    async def answer(self, request: LoadRequest, deliver: Deliver) -> Usage:
        import httpx

        body: dict[str, Any] = {
            "model": self.name,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages" if request.is_chat else "prompt": request.prompt,
        }
        if request.lane != "interactive":
            body["lane"] = request.lane
        url = f"{self._url}/v1/{'chat/completions' if request.is_chat else 'completions'}"
        usage, ended = Usage(None, None), False
        try:
            async with self._client.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    raise LoadError(f"HTTP {response.status_code}", _message(await response.aread()))
                async with aclosing(_events(response)) as events:
                    async for event in events:
                        for choice in event.get("choices", ()):
                            ended = ended or choice.get("finish_reason") is not None
                            if _brings_tokens(choice):
                                deliver()
                        if event.get("usage"):
                            counts = event["usage"]
                            usage = Usage(counts.get("prompt_tokens"), counts.get("completion_tokens"))
        except httpx.TransportError as error:
            kind = "no connection" if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) else "disconnected"
            raise LoadError(kind, f"{type(error).__name__}: {error}") from error
        if not ended:
            raise LoadError("disconnected", "the answer ended without a finish reason")
        return usage

    async def close(self) -> None:
        await self._client.aclose()


async def _served_model(client: "httpx.AsyncClient", root: str, wanted: str | None) -> tuple[str, int | None]:
    """Name of the model, and its vocabulary where the server tells it."""
    import httpx

    url = f"{root}/v1/models"
    try:
        response = await client.get(url, timeout=_CONNECT_SECONDS)
        models = {str(model["id"]): model for model in response.json()["data"]} if response.is_success else None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise KilnError(
            f"no answer from {url} ({type(error).__name__}: {error}); check the address, and that the server runs"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise KilnError(f"{url} gave no list of models; expected an OpenAI-compatible server") from error
    if models is None:
        raise KilnError(
            f"{url} answered {response.status_code}: {_message(response.content)}; expected an OpenAI-compatible "
            "server; give its key with --api-key-file if it wants one"
        )
    if wanted is None and len(models) != 1:
        raise KilnError(f"{url} serves {', '.join(models) or 'no models'}; choose one with --model")
    name = wanted or next(iter(models))
    if name not in models:
        raise KilnError(f"{url} serves {', '.join(models) or 'no models'}, not {name}; choose one of them with --model")
    told = models[name].get("vocab_size")
    return name, told if isinstance(told, int) and told > 0 else None


async def _events(response: "httpx.Response") -> AsyncGenerator[dict[str, Any], None]:
    """The JSON documents of a stream of server-sent events. Raises LoadError for an error among them."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise LoadError("no JSON", f"the server sent {data[:100]!r}") from error
        if "error" in event:
            raise LoadError("failed", _message(data.encode()))
        yield event


def _brings_tokens(choice: Mapping[str, Any]) -> bool:
    """Not the role at the beginning of a chat answer, nor a finish reason that comes alone.

    A token whose character is incomplete comes with empty text.
    """
    if "delta" in choice:
        return bool(choice["delta"].get("content"))
    return bool(choice.get("text")) or choice.get("finish_reason") is None


def _message(content: bytes) -> str:
    """The error's own words where the body is OpenAI's error document, else its beginning."""
    text = content.decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:200]
