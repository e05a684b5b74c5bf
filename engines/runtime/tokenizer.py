"""Text to token ids and back, for one bundle's tokenizer folder.

Knows nothing of requests. Encoding is safe from several threads: it uses the tokenizer's immutable core.
Streaming text never holds half a character: bytes wait until the token that completes them.
"""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plugins.errors import KilnError, first_line

_UNKNOWN_LENGTH = 10**9
"""transformers gives 10**30 for a length that it does not know."""
_CONTEXT_TOKENS = 8
"""Prompt tokens that the streaming decoder sees first, so that it knows whether a leading space belongs to the text."""
_LOADING = threading.Lock()
"""transformers imports its parts where they are first named, which fails when two threads do it together."""


class Tokenizer:
    """A Hugging Face tokenizer folder. Raises KilnError when it cannot be loaded."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise KilnError(f"{folder} is not a folder; expected a tokenizer saved by save_pretrained")
        loaded = _load(folder)
        core = getattr(loaded, "backend_tokenizer", None)
        if core is None:
            raise KilnError(
                f"the tokenizer in {folder} is a {type(loaded).__name__} without a fast (tokenizers) form; "
                "convert it with transformers and save it as tokenizer.json"
            )
        # Some tokenizers are saved with a length to cut or pad to, which would change requests without a word.
        core.no_truncation()
        core.no_padding()
        self._loaded = loaded
        self._core = core

    @property
    def max_length(self) -> int | None:
        """Most tokens that the model takes, as its authors noted it; None where they did not."""
        length = self._loaded.model_max_length
        return length if length < _UNKNOWN_LENGTH else None

    @property
    def core(self) -> Any:
        """The `tokenizers.Tokenizer`; must not be changed."""
        return self._core

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the model expects around one."""
        return self._core.encode(text, add_special_tokens=True).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """What `encode` gives for each text; other threads run meanwhile."""
        return [encoding.ids for encoding in self._core.encode_batch_fast(list(texts), add_special_tokens=True)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""
        return self._core.decode(list(token_ids), skip_special_tokens=True)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a chat, up to where the assistant's answer begins.

        `messages` are mappings with `role` and `content`; `tools` are given to the template, which may not know them.
        Raises KilnError without a chat template, or when the template refuses the messages.
        """
        if not self._loaded.chat_template:
            raise KilnError("the model has no chat template; give a plain prompt instead")
        if not messages:
            raise KilnError("the chat has no messages; expected at least one with role and content")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise KilnError(f"message {number} is {message!r:.80}; expected a mapping with role (text) and content")
        try:
            text = self._loaded.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever the template's own code raises
            raise KilnError(
                f"the chat template refused the messages: {first_line(error)}; change their roles, order or content"
            ) from error
        return self._core.encode_batch_fast([text], add_special_tokens=False)[0].ids  # other threads run meanwhile

    def text_stream(self, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> "TextStream":
        """Decoder of what is generated after `prompt_ids`."""
        return TextStream(self._core, prompt_ids, stop)


class TextStream:
    """Turns generated tokens into text, one at a time, and ends at a stop string."""

    def __init__(self, core: Any, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._core = core
        self._decoder = _decoder(list(prompt_ids[-_CONTEXT_TOKENS:]))
        self._stop = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        """A stop string has appeared; nothing more comes out."""
        return self._stop.stopped

    def push(self, token: int) -> str:
        """Text that this token makes certain; often empty."""
        try:
            text = self._decoder.step(self._core, token)
        except Exception:
            # The decoder refuses text that does not continue what it gave (a decoder that rewrites
            # its output). Go on from this token: at worst a space is lost.
            self._decoder = _decoder([])
            text = self._decoder.step(self._core, token)
        return self._stop.push(text) if text else ""

    def finish(self) -> str:
        """The held-back text, to be called once when generation ends without a stop string.

        Bytes of a character that was never completed are dropped.
        """
        return self._stop.finish()


class StopMatcher:
    """Finds stop strings in text that arrives in pieces; the result does not depend on how it is cut.

    The occurrence that ends first wins, and among those that end together the longest.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""  # no occurrence in it, but its end may begin one
        self.stopped = False

    def push(self, text: str) -> str:
        """Take a piece and return what is certain not to belong to a stop string."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What is held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string could begin."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


def _load(folder: Path) -> Any:
    with _LOADING:
        with _without_import_advice():
            from transformers import AutoTokenizer
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises many types for a damaged folder
            raise KilnError(
                f"cannot load the tokenizer in {folder}: {first_line(error)}; rebuild the bundle"
            ) from error


def _decoder(context: list[int]) -> Any:
    from tokenizers.decoders import DecodeStream

    return DecodeStream(ids=context, skip_special_tokens=True)


@contextmanager
def _without_import_advice() -> Iterator[None]:
    """Keep transformers from advising to install torch: a tokenizer needs none."""
    logger = logging.getLogger("transformers")

    def quiet(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)
