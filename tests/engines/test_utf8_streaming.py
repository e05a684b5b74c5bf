"""Text at token borders, with tokens that hold parts of characters and parts of two."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.runtime.tokenizer import Tokenizer

TEXTS = [
    "😀😃😄 👩‍👩‍👧‍👦👍🏽 🏳️‍🌈🇩🇪🇯🇵",
    "日本語の文章、中文字符。 한국어",
    "e\u0301a\u0308o\u0302\u0323 नमस्ते ไทย العربية",
    "ascii é \u202eright\u202c \u00a0\u2028 \U0010ffff\x00\x7f",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Byte-level BPE, learned without regard to where characters or words end."""
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces = [text[at : at + 3] for text in TEXTS for at in range(len(text))]
    core.train_from_iterator(
        pieces, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    folder = tmp_path_factory.mktemp("merged")
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    return Tokenizer(folder)


def streamed(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    stream, pieces = tokenizer.text_stream(tokenizer.encode("x"), stop), []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces
    return [*pieces, stream.finish()]


def test_some_tokens_hold_parts_of_two_characters(tokenizer):
    tokens = [tokenizer.encode(text) for text in TEXTS]
    parts = [tokenizer.decode([token]) for token in itertools.chain(*tokens)]
    assert any(len(part) > 1 and "\ufffd" in part for part in parts)


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole_and_as_soon_as_they_are_complete(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == text
    for count in range(len(ids)):
        so_far = tokenizer.decode(ids[:count])
        if not so_far.endswith("\ufffd"):
            assert "".join(pieces[:count]) == so_far


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.sampled_from([*TEXTS, *"".join(TEXTS), "\ufffd.", "plain "]), max_size=12))
def test_no_replacement_character_comes_into_valid_text(tokenizer, parts):
    text = "".join(parts)
    assert "".join(streamed(tokenizer, tokenizer.encode(text))) == text


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 329), max_size=20))
def test_invalid_bytes_come_out_as_in_the_whole_text(tokenizer, ids):
    """Tokens at random: what is never completed at the end is dropped, nothing else changes."""
    end = tokenizer.encode("end")
    whole = tokenizer.decode([*ids, *end])
    assert "".join(streamed(tokenizer, [*ids, *end])) == whole


@settings(max_examples=200, deadline=None)
@given(
    text=st.sampled_from(TEXTS),
    stop=st.lists(st.text("日本語の👩👧😃\u200d\u0301ea ", min_size=1, max_size=3), max_size=3),
    places=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=2),
)
def test_stop_strings_of_several_tokens(tokenizer, text, stop, places):
    """With some that do occur: the text ends before the first stop string that is complete, the longest such one."""
    stop = (*stop, *(found for at, length in places if (found := text[at : at + length])))
    ends = [(at + len(one), at) for one in stop if (at := text.find(one)) >= 0]
    expected = text[: min(ends)[1]] if ends else text
    assert "".join(streamed(tokenizer, tokenizer.encode(text), stop)) == expected


def test_a_character_cut_off_by_the_end_is_dropped(tokenizer):
    ids = tokenizer.encode("ok \U0001f9ff")
    assert len(tokenizer.encode("\U0001f9ff")) > 1
    assert "".join(streamed(tokenizer, ids[:-1])).rstrip() == "ok"
