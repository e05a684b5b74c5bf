"""What single tokens look like in reports of log-probabilities: their bytes, also where they are half a character.

Knows the three spellings of vocabularies: GPT-2's printable stand-ins for bytes, SentencePiece's `<0xE2>` and `▁`, and
plain text.
"""

import json
import re
from functools import cache
from typing import Any

from engines.runtime.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenText:
    """Bytes and text of the tokens of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._core: Any = tokenizer.core
        decoder = json.loads(self._core.to_str()).get("decoder") or {}
        kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))}
        self._byte_level = "ByteLevel" in kinds
        self._special = {token.content for token in self._core.get_added_tokens_decoder().values()}

    def bytes_of(self, token: int) -> bytes:
        """Empty for an id without a token, which models with a padded vocabulary can give."""
        piece = self._core.id_to_token(token)
        if piece is None:
            return b""
        if piece in self._special:
            return piece.encode()
        if self._byte_level:
            table = _bytes_from_stand_ins()
            return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()

    def text_of(self, token: int) -> str:
        """Bytes that are no character by themselves appear as U+FFFD."""
        return self.bytes_of(token).decode(errors="replace")


@cache
def _bytes_from_stand_ins() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for characters from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}
