"""Ed25519 keys: making them, reading them, and which of them a reader trusts for what.

A private key is an unencrypted PKCS#8 PEM file that only its owner may read; a public key a PEM file, or an entry of a
TOML file with the keys that are trusted:

    [keys.nightly]
    public = "MCowBQYDK2VwAyEA..."       # base64 of the PEM's body
    channels = ["candidate", "canary"]   # what it may move; by default all three

A key's id is the SHA-256 of its 32 raw bytes, so that nothing needs to be agreed on besides the key itself. Knows
nothing of what is signed.
"""

import base64
import binascii
import hashlib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.registry.records import CHANNELS, Channel
from pipeline.registry.store import RegistryError, UntrustedError
from plugins.errors import first_problem

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_NEEDED = "the 'cryptography' package is needed for signatures: pip install 'kiln-engine[registry]'"


def key_id(public: "Ed25519PublicKey") -> str:
    """SHA-256 of the raw public key, as hex."""
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()


class SigningKey:
    """A private key."""

    def __init__(self, private: "Ed25519PrivateKey") -> None:
        self._private = private
        self.id = key_id(private.public_key())

    def sign(self, message: bytes) -> bytes:
        """64 bytes."""
        return self._private.sign(message)

    @property
    def public_text(self) -> str:
        """Base64 of the public key's DER form, as a PEM file's body and a TOML file have it."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        der = self._private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return base64.b64encode(der).decode()


@dataclass(frozen=True)
class TrustedKey:
    """`channels` are those that it may move; any trusted key may publish and attest."""

    name: str
    public: "Ed25519PublicKey"
    channels: tuple[Channel, ...] = CHANNELS


class TrustedKeys:
    """The keys that a reader trusts, by id."""

    def __init__(self, keys: Iterable[TrustedKey], origin: str) -> None:
        self.origin = origin
        self._keys: Mapping[str, TrustedKey] = {key_id(key.public): key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def verify(self, identity: str, signature: bytes, message: bytes, where: str) -> TrustedKey:
        """The key that signed. Raises UntrustedError for one that is not trusted, or did not sign this."""
        from cryptography.exceptions import InvalidSignature

        key = self._keys.get(identity)
        if key is None:
            raise UntrustedError(
                f"{where} is signed by the key {identity[:16]}, which {self.origin} does not list; do not use it, or "
                "add the key if you know whose it is"
            )
        try:
            key.public.verify(signature, message)
        except InvalidSignature as error:
            raise UntrustedError(
                f"{where} does not carry a valid signature of the key '{key.name}' ({identity[:16]}): it was changed "
                "after it was signed; do not use it"
            ) from error
        return key


def create_key(path: Path) -> SigningKey:
    """Write a new private key to `path` and its public half to `path`.pub. Raises RegistryError where one exists."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
    except ImportError as error:
        raise RegistryError(_NEEDED) from error
    private = Ed25519PrivateKey.generate()
    public = public_path(path)
    if public.exists():
        raise RegistryError(f"{public} exists; choose another name: a key that is overwritten is lost")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise RegistryError(f"{path} exists; choose another name: a key that is overwritten is lost") from error
    except OSError as error:
        raise RegistryError(f"the key cannot be written to {path}: {error.strerror}; choose another path") from error
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return SigningKey(private)


def public_path(private: Path) -> Path:
    """Where the public half of a new key lies."""
    return private.with_name(private.name + ".pub")


def signing_key_from_pem(path: Path) -> SigningKey:
    """Raises RegistryError for a file that holds no Ed25519 private key, and for one that others may read."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise RegistryError(_NEEDED) from error
    data = _read(path, "private key")
    if path.stat().st_mode & 0o077:
        raise RegistryError(f"the private key {path} may be read by others; chmod 600 {path}")
    try:
        private = load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:  # TypeError: it is encrypted
        raise RegistryError(f"{path} is no unencrypted private key in PEM form; make one: kiln registry key") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise RegistryError(f"{path} is a private key of another kind than Ed25519; make one: kiln registry key")
    return SigningKey(private)


def trusted_keys_from_file(path: Path) -> TrustedKeys:
    """From a PEM file with one or several public keys, or a TOML file. Raises RegistryError naming the entry."""
    return trusted_keys_from_bytes(_read(path, "list of trusted keys"), path)


def trusted_keys_from_bytes(data: bytes, path: Path) -> TrustedKeys:
    """From the content of such a file, where `path` is what errors call it."""
    if b"-----BEGIN" in data:
        blocks = data.split(b"-----BEGIN")[1:]
        keys = [TrustedKey(path.name, _public_from_pem(b"-----BEGIN" + block, path)) for block in blocks]
    else:
        keys = list(_keys_from_toml(data, path))
    if not keys:
        raise RegistryError(f"{path} lists no key; expected PEM blocks, or [keys.NAME] tables with 'public'")
    return TrustedKeys(keys, str(path))


class _KeyEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    public: str
    channels: tuple[Channel, ...] = CHANNELS


class _KeyFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    keys: dict[str, _KeyEntry] = Field(default={})


def _keys_from_toml(data: bytes, path: Path) -> Iterable[TrustedKey]:
    try:
        document = _KeyFile.model_validate(tomllib.loads(data.decode()))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RegistryError(f"{path} is neither PEM nor TOML: {error}") from error
    except ValidationError as error:
        where, problem = first_problem(error)
        raise RegistryError(f"{path}: field '{where}': {problem}") from error
    for name, entry in document.keys.items():
        try:
            der = base64.b64decode(entry.public, validate=True)
        except binascii.Error as error:
            raise RegistryError(f"{path}: keys.{name}.public is no base64: {error}") from error
        pem = b"-----BEGIN PUBLIC KEY-----\n" + base64.encodebytes(der) + b"-----END PUBLIC KEY-----\n"
        yield TrustedKey(name, _public_from_pem(pem, path), entry.channels)


def _public_from_pem(data: bytes, path: Path) -> "Ed25519PublicKey":
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise RegistryError(_NEEDED) from error
    try:
        public = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise RegistryError(
            f"{path} holds what is no public key; expected the .pub file of kiln registry key"
        ) from error
    if not isinstance(public, Ed25519PublicKey):
        raise RegistryError(f"{path} holds a public key of another kind than Ed25519")
    return public


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RegistryError(f"the {what} {path} cannot be read: {error.strerror}; check the path") from error
