import itertools
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.runtime.tokenizer import StopMatcher, Tokenizer
from plugins.errors import KilnError

TEMPLATE = """
{%- for m in messages %}
{%- if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def save(core, folder: Path, **options) -> Path:
    from transformers import PreTrainedTokenizerFast

    core.add_special_tokens(SPECIAL)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", **options).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bytes_folder(tmp_path_factory) -> Path:
    """One token per byte, so that every character outside ASCII spans tokens."""
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Core(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return save(core, tmp_path_factory.mktemp("bytes"), chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def metaspace_folder(tmp_path_factory) -> Path:
    """In the manner of SentencePiece: words with a leading mark, other characters as byte tokens."""
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers

    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcdefghij"]
    core = Core(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return save(core, tmp_path_factory.mktemp("metaspace"))


@pytest.fixture(scope="session")
def byte_tokenizer(bytes_folder) -> Tokenizer:
    return Tokenizer(bytes_folder)


def streamed(tokenizer: Tokenizer, prompt: str, ids: list[int], stop=()) -> list[str]:
    stream = tokenizer.text_stream(tokenizer.encode(prompt), stop)
    return [*(stream.push(token) for token in ids), "" if stream.stopped else stream.finish()]


def test_characters_come_whole(byte_tokenizer):
    text = "é 日本 😀👩‍👩‍👧 end"
    pieces = streamed(byte_tokenizer, "x", byte_tokenizer.encode(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(byte_tokenizer.encode("😀")) == 4


@given(text=st.text(max_size=40), prompt=st.text(min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_streamed_text_equals_decoded_text(byte_tokenizer, text, prompt):
    ids = byte_tokenizer.encode(text)
    whole = byte_tokenizer.decode(ids)
    assert "".join(streamed(byte_tokenizer, prompt, ids)) == whole.rstrip("\ufffd")


def test_a_character_that_is_never_completed_is_dropped(byte_tokenizer):
    ids = byte_tokenizer.encode("ok 😀")
    assert "".join(streamed(byte_tokenizer, "x", ids[:-1])) == "ok "


def test_special_tokens_are_not_text(byte_tokenizer):
    end = byte_tokenizer.core.token_to_id("<|im_end|>")
    assert (
        "".join(streamed(byte_tokenizer, "x", [*byte_tokenizer.encode("a"), end, *byte_tokenizer.encode("b")])) == "ab"
    )


def test_a_leading_space_after_the_prompt_is_kept(metaspace_folder):
    tokenizer = Tokenizer(metaspace_folder)
    ids = tokenizer.encode("a b é c")
    assert "".join(streamed(tokenizer, "a", ids)) == " a b é c"
    assert tokenizer.decode(ids) == "a b é c"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("End",), "one two "),
        (("wo E", "End"), "one t"),
        (("missing",), "one two End three"),
        (("three!", "x t"), "one two End three"),
        (("d t",), "one two En"),
    ],
)
def test_stop_strings_span_tokens(byte_tokenizer, stop, expected):
    ids = byte_tokenizer.encode("one two End three")
    assert "".join(streamed(byte_tokenizer, "x", ids, stop)) == expected


LETTERS = st.text("ab", max_size=30)


@given(LETTERS, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 30), max_size=8))
@settings(max_examples=300, deadline=None)
def test_stop_matching_does_not_depend_on_the_cuts(text, stop, cuts):
    """Against the definition: the shortest beginning of the text that ends with a stop string, the longest such one."""
    expected, stopped = text, False
    for end in range(len(text) + 1):
        ends = [s for s in stop if text[:end].endswith(s)]
        if ends:
            expected, stopped = text[: end - max(map(len, ends))], True
            break
    matcher = StopMatcher(stop)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    out = "".join(matcher.push(text[a:b]) for a, b in itertools.pairwise(edges))
    assert text.startswith(out)
    assert matcher.stopped == stopped
    assert out + matcher.finish() == expected


def test_only_text_that_could_begin_a_stop_string_is_held_back():
    matcher = StopMatcher(["###"])
    assert [matcher.push(piece) for piece in ("ab", "c#", "#", "d")] == ["ab", "c", "", "##d"]


def test_chat_prompt_follows_the_template(byte_tokenizer):
    ids = byte_tokenizer.chat_prompt([{"role": "user", "content": " hi "}])
    text = byte_tokenizer.core.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == byte_tokenizer.core.token_to_id("<|im_start|>")


def test_chat_errors_say_what_to_do(byte_tokenizer, metaspace_folder):
    with pytest.raises(KilnError, match="no chat template; give a plain prompt"):
        Tokenizer(metaspace_folder).chat_prompt([{"role": "user", "content": "hi"}])
    with pytest.raises(KilnError, match="no messages"):
        byte_tokenizer.chat_prompt([])
    for wrong in ({"content": "hi"}, "hi"):
        with pytest.raises(KilnError, match=r"message 1 is .*; expected a mapping with role"):
            byte_tokenizer.chat_prompt([{"role": "user", "content": "hi"}, wrong])
    with pytest.raises(KilnError, match="refused the messages: no tools here"):
        byte_tokenizer.chat_prompt([{"role": "tool", "content": "hi"}])


def test_a_damaged_folder_is_refused(tmp_path):
    with pytest.raises(KilnError, match="is not a folder"):
        Tokenizer(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(KilnError, match="cannot load the tokenizer in"):
        Tokenizer(tmp_path)


def test_encoding_from_many_threads(byte_tokenizer):
    expected = byte_tokenizer.encode("some text " * 50)
    results: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: results.extend(byte_tokenizer.encode("some text " * 50) for _ in range(20)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 160


def test_works_quietly_without_torch(bytes_folder):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from engines.runtime.tokenizer import Tokenizer\n"
        f"t = Tokenizer(Path({str(bytes_folder)!r}))\n"
        "print(len(t.chat_prompt([{'role': 'user', 'content': 'hi'}])))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().isdigit()
    assert done.stderr == ""


def test_a_saved_length_to_cut_or_pad_to_is_not_followed(bytes_folder, tmp_path):
    """all-MiniLM's tokenizer comes with both."""
    from tokenizers import Tokenizer as Core

    core = Core.from_file(str(bytes_folder / "tokenizer.json"))
    core.enable_truncation(4)
    core.enable_padding(length=6)
    saved = Tokenizer(save(core, tmp_path, model_max_length=128))
    assert len(saved.encode("abcdefgh")) == 8
    assert saved.encode_all(["a", "abcdefgh"]) == [saved.encode("a"), saved.encode("abcdefgh")]
    assert len(saved.encode("a")) == 1
    assert saved.max_length == 128
    assert Tokenizer(bytes_folder).max_length is None
