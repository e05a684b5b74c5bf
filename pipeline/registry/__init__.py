"""The registry: engine bundles in a folder or an object store, signed, content-addressed, with release channels."""

from pipeline.registry.keys import SigningKey, TrustedKeys
from pipeline.registry.records import Attestation, Channel, ChannelEntry, Release
from pipeline.registry.registry import Registry
from pipeline.registry.store import RegistryError, Store, UntrustedError

__all__ = [
    "Attestation",
    "Channel",
    "ChannelEntry",
    "Registry",
    "RegistryError",
    "Release",
    "SigningKey",
    "Store",
    "TrustedKeys",
    "UntrustedError",
]
