"""Signed documents: one line with the signature, then the bytes that it covers.

    kiln ed25519 KEY-ID SIGNATURE
    {"format": 1, ...}

KEY-ID and SIGNATURE are hex of fixed length, or both '-' in an unsigned one. The signature covers the document's kind
and its place in the registry besides its bytes, so that a release cannot stand in for a channel, nor one model's for
another's. It is checked on the bytes as they were read: nothing is parsed before. (Ed25519: RFC 8032.)
"""

import re
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from pipeline.registry.keys import SigningKey, TrustedKey, TrustedKeys
from pipeline.registry.store import UntrustedError
from plugins.errors import first_problem

_HEADER = re.compile(rb"kiln ed25519 ([0-9a-f]{64}|-) ([0-9a-f]{128}|-)\n")
_LONGEST_HEADER = 256
_UNSIGNED = b"-"
Record = TypeVar("Record", bound=BaseModel)


def seal(record: BaseModel, place: str, key: SigningKey | None) -> bytes:
    """The document of a record, signed for its place in the registry unless there is no key."""
    body = record.model_dump_json().encode()
    if key is None:
        return b"kiln ed25519 - -\n" + body
    return f"kiln ed25519 {key.id} {key.sign(_covered(place, body)).hex()}\n".encode() + body


def unseal(
    data: bytes, place: str, kind: type[Record], trusted: TrustedKeys | None, where: str
) -> tuple[Record, TrustedKey | None]:
    """The record and who signed it. `trusted` None takes anything, signed or not: the caller was told to.

    Raises UntrustedError for what is unsigned, signed by others, changed, or no such record.
    """
    header = _HEADER.match(data[:_LONGEST_HEADER])
    if header is None:
        raise UntrustedError(f"{where} does not begin as a signed document does; it was damaged, or is not Kiln's")
    identity, signature = header.groups()
    body = data[header.end() :]
    signer = None
    if trusted is not None:
        if _UNSIGNED in (identity, signature):
            raise UntrustedError(f"{where} is not signed; sign it with --key, or say --allow-unsigned to take it")
        signer = trusted.verify(identity.decode(), bytes.fromhex(signature.decode()), _covered(place, body), where)
    try:
        return kind.model_validate_json(body), signer
    except ValidationError as error:
        field, problem = first_problem(error)
        raise UntrustedError(f"{where}: field '{field}': {problem}; another version of Kiln wrote it") from error


def _covered(place: str, body: bytes) -> bytes:
    return b"kiln-registry-1\0" + place.encode() + b"\0" + body
