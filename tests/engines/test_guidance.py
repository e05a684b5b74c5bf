"""Whatever the model prefers, a guided answer matches; and no guidance from a stranger harms the process."""

import json
import re
import threading
from itertools import pairwise

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.runtime import guidance as module
from engines.runtime.guidance import GuideCompiler, GuideState
from engines.runtime.request import Guidance
from engines.runtime.tokenizer import Tokenizer
from plugins.errors import KilnError

MERGES = [("{", '"'), ('"', ":"), ('"', "}"), ("t", "r"), ("u", "e"), ("tr", "ue"), ("a", "b"), ("ab", "c"), ("1", "2")]
UNUSED = 37
"""Ids beyond the tokenizer's that the model has logits for."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """A token for every byte, some for several, three special ones."""
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]
    core = Core(models.BPE({piece: number for number, piece in enumerate(pieces)}, MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<end>", "<turn>", "<other>"])
    folder = tmp_path_factory.mktemp("guided")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def width(tokenizer) -> int:
    return tokenizer.core.get_vocab_size() + UNUSED


@pytest.fixture(scope="module")
def eos(tokenizer) -> tuple[int, int]:
    return tokenizer.core.token_to_id("<end>"), tokenizer.core.token_to_id("<turn>")


@pytest.fixture(scope="module")
def compiler(tokenizer, width, eos) -> GuideCompiler:
    return GuideCompiler(tokenizer, width, eos)


def json_schema(**schema) -> Guidance:
    return Guidance("json_schema", json.dumps(schema))


def allowed(state: GuideState, width: int) -> set[int]:
    return set(np.flatnonzero(np.isfinite(state.mask(np.zeros(width, np.float32)))).tolist())


def answer(tokenizer, compiler, width, eos, guidance, seed: int, most: int = 3000) -> str:
    """What a model with random logits answers; it must come to an end."""
    random, state, tokens = np.random.default_rng(seed), compiler.compile(guidance).start(), []
    while not state.finished:
        assert len(tokens) < most, tokenizer.decode(tokens)
        logits = random.normal(size=width).astype(np.float32)
        masked = state.mask(logits)
        token = int(np.argmax(masked))
        assert masked[token] == logits[token], "an allowed token keeps its logit"
        state.accept(token)
        tokens.append(token)
    return tokenizer.decode([token for token in tokens if token not in eos])


SHORT = {"type": "string", "maxLength": 6}
SCHEMAS = [
    {"type": "object", "properties": {"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
     "required": ["name", "age"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "ü😀", None, 3]}, "c": SHORT},
     "additionalProperties": False},
    {"type": "array", "items": {"anyOf": [SHORT, {"type": "null"}, {"type": "boolean"}]}, "minItems": 2, "maxItems": 5},
    {"type": "object", "properties": {"when": {"type": "string", "format": "date"},
     "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"}}, "required": ["when", "code"],
     "additionalProperties": False},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {
        "value": {"type": "integer", "minimum": -5, "maximum": 5},
        "children": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/tree"}}},
        "required": ["value", "children"], "additionalProperties": False}}},
    {"const": {"deep": [1, {"x": "\"\\\n"}]}},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 7, "maximum": 700}}},
     {"required": ["a"], "additionalProperties": False, "properties": {"a": {"minimum": 7}}}]},
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(schema=st.sampled_from(SCHEMAS), seed=st.integers(0, 2**32))
def test_answers_are_valid_by_their_schema(tokenizer, compiler, width, eos, schema, seed):
    text = answer(tokenizer, compiler, width, eos, json_schema(**schema), seed)
    jsonschema_rs.validate(schema, json.loads(text))


EXPRESSIONS = [
    r"[0-9]{3}-[a-f]{2,4}", "(yes|no|maybe)( please)?", "a?b?c?d?", "x*y", "[^a-z]{1,3}z", "(ab|abc)(c|d)?", "ü+😀?é",
    r"(\+[0-9]{1,3} )?[0-9]{4,6}", "a{0,3}",
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(expression=st.sampled_from(EXPRESSIONS), seed=st.integers(0, 2**32))
def test_answers_match_their_expression(tokenizer, compiler, width, eos, expression, seed):
    text = answer(tokenizer, compiler, width, eos, Guidance("regex", expression), seed)
    assert re.fullmatch(expression, text), text


@settings(max_examples=60, deadline=None)
@given(
    choices=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_answers_are_one_of_the_choices(tokenizer, compiler, width, eos, choices, seed):
    assert answer(tokenizer, compiler, width, eos, Guidance("choices", tuple(choices)), seed) in choices


def test_every_choice_can_be_answered(tokenizer, compiler, width, eos):
    choices = ("a", "ab", "abc", '"|\\', "(?i)x", "日本 😀\n", "")
    guidance = Guidance("choices", choices)
    assert {answer(tokenizer, compiler, width, eos, guidance, seed) for seed in range(300)} == set(choices)


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("json_object", "", '{"a": [1, {"b": null}],\n  "c": "d"}'),
        ("grammar", 'start: "(" start ")" | "x"', "(((x)))"),
        ("regex", "^abc$", "abc"),
    ],
)
def test_a_text_that_matches_can_be_written_to_its_end(tokenizer, compiler, width, eos, kind, value, text):
    state = compiler.compile(Guidance(kind, value)).start()
    for token in tokenizer.encode(text):
        assert not state.finished
        assert token in allowed(state, width)
        assert not allowed(state, width) & set(eos)
        state.accept(token)
    assert state.finished
    assert allowed(state, width) == set(eos)


def test_any_json_object_has_no_other_value(compiler, tokenizer, width):
    first = allowed(compiler.compile(Guidance("json_object")).start(), width)
    assert {tokenizer.decode([token]) for token in first} == {"{", '{"'}


def test_white_space_ends(compiler, tokenizer, width):
    state = compiler.compile(Guidance("json_object")).start()
    newline, space = tokenizer.encode("\n "), tokenizer.encode(" ")[0]
    for token in [*tokenizer.encode("{"), *newline]:
        state.accept(token)
    for _ in range(39):
        state.accept(space)
    assert not allowed(state, width) & {space, *newline}


def test_the_models_own_ends_alone_may_end_an_answer(tokenizer, width, eos):
    other = tokenizer.core.token_to_id("<other>")
    for ends in (eos, (other,), (other, *eos), ()):
        state = GuideCompiler(tokenizer, width, ends).compile(Guidance("regex", "ab*")).start()
        assert not allowed(state, width) & {*eos, other}
        state.accept(tokenizer.encode("a")[0])
        assert allowed(state, width) & {*eos, other} == set(ends)
        for end in ends:
            fork = state.fork()
            fork.accept(end)
            assert fork.finished
    assert not state.finished


def test_a_model_without_an_end_writes_every_text(tokenizer, width):
    """Left to choose, the library takes token 0, `!`, for the end of this tokenizer's texts."""
    for ends in ((), (width - 1,)):
        state = GuideCompiler(tokenizer, width, ends).compile(Guidance("regex", "!(![a!])?")).start()
        assert allowed(state, width) == {0}
        state.accept(0)
        assert allowed(state, width) == {0}
        state.accept(0)
        assert allowed(state, width) == {0, tokenizer.encode("a")[0]}
        state.accept(0)
        assert state.finished


def test_ids_beyond_the_tokenizers_are_never_allowed(tokenizer, compiler, width):
    state = compiler.compile(Guidance("regex", r"(.|\n)*")).start()
    assert max(allowed(state, width)) < tokenizer.core.get_vocab_size()
    narrow = GuideCompiler(tokenizer, 100, ())
    assert allowed(narrow.compile(Guidance("regex", "[a-z]+")).start(), 100) <= set(range(100))
    with pytest.raises(KilnError, match="no token of the model can continue the answer by its regular expression"):
        allowed(narrow.compile(Guidance("regex", "é")).start(), 100)


def test_the_logits_given_stay_as_they_are(compiler, width):
    logits = np.arange(width, dtype=np.float32)
    masked = compiler.compile(Guidance("choices", ("a",))).start().mask(logits)
    assert (logits == np.arange(width)).all()
    assert masked.dtype == np.float32
    assert np.isfinite(masked).sum() == 1


def test_forks_go_their_own_ways(tokenizer, compiler, width):
    a, b, c = (tokenizer.encode(letter)[0] for letter in "axc")
    state = compiler.compile(Guidance("choices", ("axa", "axc", "c"))).start()
    state.accept(a)
    fork = state.fork()
    fork.accept(b)
    assert allowed(fork, width) == {a, c}
    assert allowed(state, width) == {b}
    fork.accept(c)
    assert fork.finished
    assert not state.finished


def test_forced_tokens_spell_what_must_follow(tokenizer, compiler, width):
    state = compiler.compile(Guidance("regex", "population: (abc|abd)")).start()
    before = allowed(state, width)
    forced = state.forced()
    assert forced
    assert "population: ".startswith(tokenizer.decode(forced))
    assert allowed(state, width) == before
    for token in forced:
        state.accept(token)
    assert compiler.compile(Guidance("regex", "[a-z]+")).start().forced() == []


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json_schema", "{", "the JSON schema cannot be read: .*; expected the JSON text of an object"),
        ("json_schema", "[1]", "the JSON schema cannot be read: .*; expected the JSON text of an object"),
        ("json_schema", '{} } start: "a"', "the JSON schema cannot be read"),
        ("json_schema", '{"type": "text"}', "Invalid type: text; correct the JSON schema"),
        ("json_schema", '{"not": {}}', r'Unimplemented keys: \["not"\]; leave it out, or write "x-guidance"'),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "string", "format": "color"}', "Unknown format: color; leave it out"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "'http://example.com/schema' is not present"),
        ("json_schema", '{"type": "string", "pattern": "a(?=b)"}', "look-ahead and look-behind, is not supported"),
        ("json_schema", '{"minLength": 3, "maxLength": 2, "type": "string"}', r"minLength \(3\) is greater than"),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "nothing can match it"),
        ("regex", "(", "unclosed group; correct the regular expression"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", r"\bword", "lookarounds not supported"),
        ("regex", "a\ud800", "contains half a character"),
        ("grammar", "start: (", "no answer can be guided by this grammar: 1"),
        ("grammar", "start: unknown", "unknown"),
        ("grammar", '{"grammars": []}', "expecting rule"),
    ],
)
def test_what_is_wrong_is_said(compiler, kind, value, message):
    with pytest.raises(KilnError, match=message) as caught:
        compiler.compile(Guidance(kind, value))
    assert "\n" not in str(caught.value)


def test_unsupported_keywords_are_ignored_on_request(compiler):
    assert compiler.compile(json_schema(type="array", uniqueItems=True, **{"x-guidance": {"lenient": True}}))


def test_a_tokenizer_that_the_library_cannot_read_is_refused(tmp_path):
    from tokenizers import Tokenizer as Core
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    core = Core(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path)
    with pytest.raises(KilnError, match="guided output does not work with this model's tokenizer"):
        GuideCompiler(Tokenizer(tmp_path), 2, ()).compile(Guidance("json_object"))


def chain(link, length: int) -> str:
    """A schema of references that follow one another; `link` puts one into a schema."""
    definitions = {f"d{n}": link({"$ref": f"#/$defs/d{n + 1}"}) for n in range(length)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {}}}, separators=(",", ":"))


def nested(reference):
    for _ in range(90):
        reference = {"items": reference}
    return reference


HOSTILE = {
    "10 MB": ("json_schema", json.dumps({"type": "string", "description": "x" * 10_000_000})),
    "10 MB of regex": ("regex", "ab" * 5_000_000),
    "10,000 deep": ("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000),
    "200 deep": ("json_schema", '{"items":' * 200 + "{}" + "}" * 200),
    "references": ("json_schema", chain(lambda reference: reference, 3500)),
    "objects by reference": ("json_schema", chain(lambda reference: {"properties": {"a": reference}}, 2150)),
    "arrays by reference": ("json_schema", chain(nested, 132)),
    "allOf by reference": ("json_schema", chain(lambda reference: {"allOf": [reference, {"minLength": 1}]}, 2000)),
    "doubling": ("json_schema", chain(lambda reference: {"allOf": [reference, reference]}, 40)),
    "products": ("json_schema", json.dumps({"allOf": [
        {"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(4)]} for i in range(12)]})),
    "long constant": ("json_schema", json.dumps({"const": "x" * 20_000})),
    "many properties": ("json_schema", json.dumps({"properties": {f"property {n}": {} for n in range(9000)}})),
    "many items": ("json_schema", json.dumps({"type": "array", "minItems": 10**9, "items": {"type": "string"}})),
    "multiples": ("json_schema", '{"allOf": [{"type": "integer", "multipleOf": 99991}, {"multipleOf": 99989}]}'),
    "pattern": ("json_schema", '{"type": "string", "pattern": "^((a{100}){100}){100}$"}'),
    "hidden pattern": ("json_schema", '{"type": "string", "pattern": "^[a-z]{8}(.*a.{20}){20}$"}'),
    "states": ("regex", "(a|b)*a(a|b){500}"),
    "backtracking": ("regex", "(a+)+(a+)+(a|aa)*b"),
    "parentheses": ("regex", "(" * 10_000 + "a" + ")" * 10_000),
    "optional": ("regex", "a?" * 5000 + "a" * 5000),
    "deep grammar": ("grammar", "start: " + "(" * 8000 + '"a"' + ")" * 8000),
    "chain of rules": ("grammar", "start: r0\n" + "".join(f"r{n}: r{n + 1}+\n" for n in range(1100)) + 'r1100: "b"'),
    "chain of terminals": ("grammar", "start: T0\n" + "".join(f"T{n}: T{n + 1}\n" for n in range(1100)) + 'T1100: "b"'),
    "doubled rules": ("grammar", "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(40)) + 'r40: "b"'),
    "ambiguous": ("grammar", 'start: e\ne: e e | "a" | e "a" e | '),
    "left recursion": ("grammar", "start: start | start start"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_guidance_is_refused_or_followed(compiler, width, name):
    """The time-out is the test runner's: none of these takes more than about a second."""
    random = np.random.default_rng(3)
    try:
        state = compiler.compile(Guidance(*HOSTILE[name])).start()
        for _ in range(40):
            if state.finished:
                break
            state.accept(int(np.argmax(state.mask(random.normal(size=width).astype(np.float32)))))
    except KilnError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right
        assert len(str(error)) < 700  # noqa: PT017


def test_a_bound_that_is_met_later_fails_that_answer_alone(compiler, width, tokenizer):
    guide = compiler.compile(Guidance("grammar", 'start: e\ne: e e | "a" | e "a" e | '))
    state, other = guide.start(), guide.start()
    a = tokenizer.encode("a")[0]

    def write() -> None:
        for _ in range(200):
            state.mask(np.zeros(width, np.float32))
            state.accept(a)

    with pytest.raises(KilnError, match=r"the answer cannot follow its grammar after \d+ tokens: .*; make it simpler"):
        write()
    assert a in allowed(other, width)


def test_answers_of_one_guide_do_not_use_up_its_lexer(tokenizer, width, eos, monkeypatch):
    """Answers share a lexer, which only grows: when it is full, a new one takes over in the middle of an answer."""
    monkeypatch.setattr(module, "_LEXER_STATES", 400)
    compiler, expression = GuideCompiler(tokenizer, width, eos), "(a|b)*a(a|b){60}"
    made = []
    compiled = module._matcher_from_grammar
    monkeypatch.setattr(module, "_matcher_from_grammar", lambda *arguments: made.append(1) or compiled(*arguments))
    for seed in range(10):
        assert re.fullmatch(expression, answer(tokenizer, compiler, width, eos, Guidance("regex", expression), seed))
        random, state = np.random.default_rng(seed), compiler.compile(Guidance("regex", expression)).start()
        forks = {state: [], state.fork(): []}
        while any(not fork.finished for fork in forks):
            for fork, tokens in forks.items():
                if not fork.finished:
                    tokens.append(int(np.argmax(fork.mask(random.normal(size=width).astype(np.float32)))))
                    fork.accept(tokens[-1])
        texts = [tokenizer.decode([token for token in tokens if token not in eos]) for tokens in forks.values()]
        assert all(re.fullmatch(expression, text) for text in texts)
    assert len(made) > 1


def test_equal_guidance_is_compiled_once(compiler, tokenizer, width):
    one, two = (Guidance("choices", ("once", "twice")) for _ in range(2))
    assert compiler.compile(one) is compiler.compile(two)


def test_many_threads_share_a_compiler(tokenizer, width, eos):
    compiler, kinds = GuideCompiler(tokenizer, width, eos), [json_schema(**schema) for schema in SCHEMAS[:4]]
    texts: list[tuple[int, int, str]] = []

    def run(thread: int) -> None:
        for number, guidance in enumerate(kinds * 3):
            which = number % len(kinds)
            seed = 100 * which + number // len(kinds)
            texts.append((which, seed, answer(tokenizer, compiler, width, eos, guidance, seed)))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts.sort()
    assert len(texts) == 8 * 12
    assert all(text == after for (*key, text), (*next_key, after) in pairwise(texts) if key == next_key)
    assert threading.stack_size() == 0
