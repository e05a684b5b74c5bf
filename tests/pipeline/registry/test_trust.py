"""What comes out is what was signed and nothing else: changed, foreign, damaged and older things are refused."""

import pytest

from engines.bundle import open_bundle
from pipeline.registry import Registry, RegistryError, Release, Store
from pipeline.registry.keys import create_key, signing_key_from_pem, trusted_keys_from_file
from pipeline.registry.pull import pull
from pipeline.registry.records import chunk_key, release_key
from tests.pipeline.registry.registry_material import MACHINE, make_bundle, place


def test_what_was_changed_is_refused_before_it_is_parsed(registry, publish, monkeypatch, tmp_path):
    release = publish()
    key = release_key(*place(release), 1)
    data = registry.store.read(key)
    monkeypatch.setattr(Release, "model_validate_json", lambda *_: pytest.fail("it was parsed"))
    for changed in (
        data.replace(b'"version":1', b'"version":9'),
        data[:-1],
        data + b" ",
        data.split(b"\n")[0] + b"\n\x00\xff no JSON at all",
    ):
        registry.store.put(key, changed)
        with pytest.raises(RegistryError, match="valid signature"):
            pull(registry, *place(release), tmp_path / "out", version=1)
    signature = data.split()[3]
    registry.store.put(key, data.replace(signature, signature[::-1]))
    with pytest.raises(RegistryError, match="valid signature"):
        pull(registry, *place(release), tmp_path / "out", version=1)
    registry.store.put(key, b"nonsense")
    with pytest.raises(RegistryError, match="does not begin"):
        pull(registry, *place(release), tmp_path / "out", version=1)
    assert not (tmp_path / "out").exists()


def test_a_record_stands_only_where_it_was_signed_for(registry, publish):
    first, second = publish(b"a"), publish(b"b")
    key = release_key(*place(first), 2)
    registry.store.put(key, registry.store.read(release_key(*place(first), 1)))
    with pytest.raises(RegistryError, match="valid signature"):
        registry.release(*place(second), 2)


def test_unsigned_and_foreign_releases_are_refused_unless_told(url, keys, tmp_path):
    bundle = make_bundle(tmp_path / "bundle")
    create_key(tmp_path / "stranger.pem")
    stranger = signing_key_from_pem(tmp_path / "stranger.pem")
    Registry(Store(url), None, stranger).publish(bundle.path, "foreign")
    Registry(Store(url), None, None).publish(bundle.path, "unsigned")
    careful, careless = Registry(Store(url), keys[1]), Registry(Store(url), None)
    for model, reason in (("foreign", "does not list"), ("unsigned", "is not signed")):
        with pytest.raises(RegistryError, match=reason):
            pull(careful, model, "cpu-avx2", tmp_path / model, "candidate")
        assert not (tmp_path / model).exists()
        pull(careless, model, "cpu-avx2", tmp_path / model, "candidate")
        assert open_bundle(tmp_path / model).sha256 == bundle.sha256


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1], "the upload was cut off"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "changed or damaged"),
        (None, "is missing"),
    ],
)
def test_a_damaged_part_is_found_and_repaired(registry, publish, tmp_path, damage, reason):
    release = publish()
    pull(registry, *place(release), tmp_path / "out", "candidate")
    key = chunk_key(release.files["engine.onnx"].chunks[-1])
    whole = registry.store.read(key)
    if damage is None:
        registry.store.delete(key)
    else:
        registry.store.put(key, damage(whole))
    assert len(registry.check(release)) == 1
    assert reason in registry.check(release)[0]
    with pytest.raises(RegistryError, match=reason):
        pull(registry, *place(release), tmp_path / "second", "candidate")
    assert not (tmp_path / "second").exists()
    publish(repair=True)
    assert registry.check(release) == []
    pull(registry, *place(release), tmp_path / "second", "candidate")
    assert open_bundle(tmp_path / "second").sha256 == release.bundle


def test_a_key_moves_only_its_channels(url, tmp_path):
    key = create_key(tmp_path / "nightly.pem")
    trust = tmp_path / "trusted.toml"
    trust.write_text(f'[keys.nightly]\npublic = "{key.public_text}"\nchannels = ["candidate", "canary"]\n')
    registry = Registry(Store(url), trusted_keys_from_file(trust), key)
    release = registry.publish(make_bundle(tmp_path / "bundle").path)
    registry.attest(release, True, MACHINE, {})
    registry.promote(*place(release), "canary")
    registry.promote(*place(release), "stable")
    with pytest.raises(RegistryError, match="may move only candidate, canary"):
        pull(registry, *place(release), tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "lists no key"),
        ("[keys.a]\npublic = 'AAAA'", "no public key"),
        ("[keys.a]\npublic = '?'", "no base64"),
        ("[keys.a]\nsecret = 1", "keys.a.public"),
        ("[keys.a]\npublic = 'AA=='\nchannels = ['prod']", "keys.a.channels.0"),
        ("keys = [", "neither PEM nor TOML"),
        ("-----BEGIN NONSENSE-----\n", "no public key"),
    ],
)
def test_a_bad_list_of_keys_is_named(tmp_path, text, reason):
    path = tmp_path / "trusted"
    path.write_text(text)
    with pytest.raises(RegistryError, match=reason):
        trusted_keys_from_file(path)


def test_a_private_key_is_private(tmp_path):
    path = tmp_path / "k.pem"
    create_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(RegistryError, match="a key that is overwritten is lost"):
        create_key(path)
    path.chmod(0o644)
    with pytest.raises(RegistryError, match="chmod 600"):
        signing_key_from_pem(path)


# Older states


def test_a_lower_version_is_refused_unless_told(registry, publish, tmp_path):
    release, out = publish(b"a"), tmp_path / "out"
    publish(b"b")
    pull(registry, *place(release), out, version=2)
    with pytest.raises(RegistryError, match="has version 2; 1 is lower"):
        pull(registry, *place(release), out, version=1)
    assert (out / "engine.onnx").read_bytes()[:1] == b"b"
    assert pull(registry, *place(release), out, version=1, allow_downgrade=True) == release
    assert (out / "engine.onnx").read_bytes()[:1] == b"a"


def test_a_rollback_is_taken_and_an_old_state_is_not(registry, publish, tmp_path):
    release, out = publish(b"a"), tmp_path / "out"
    publish(b"b")
    publish(b"c")
    for version in (1, 2, 3):
        registry.promote(*place(release), "canary", version)
        registry.promote(*place(release), "stable", version)
    pull(registry, *place(release), out)
    newest = "channels/tiny/cpu-avx2/stable/00000003"
    data = registry.store.read(newest)
    registry.store.delete(newest)  # what somebody without a key can do
    with pytest.raises(RegistryError, match="put an old state back"):
        pull(registry, *place(release), out)
    registry.store.put(newest, data)
    registry.rollback(*place(release))
    registry.rollback(*place(release))
    assert pull(registry, *place(release), out).version == 1
    registry.promote(*place(release), "stable", 2)
    assert pull(registry, *place(release), out).version == 2
