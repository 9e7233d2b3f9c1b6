"""A twin's structured answers: they follow their grammar, and depend on the seed alone."""

import json
import re

import pytest

pytest.importorskip("llguidance")

from tokentwin.apiserver.filler import PlainTexts
from tokentwin.apiserver.structured_filler import StructuredFiller
from tokentwin.realengine.grammar import grammar_of_rules, json_grammar, regex_grammar
from tokentwin.serving.errors import UserError

VOCABULARY = 32_000
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "skills": {"type": "array", "items": {"type": "string"}, "minItems": 2},
        "kind": {"enum": ["blau", "grün"]},
    },
    "required": ["name", "age", "skills", "kind"],
    "additionalProperties": False,
}
RULES = 'root ::= "SELECT " column " WHERE " column " = " [0-9]+\ncolumn ::= "one" | "two"'


@pytest.fixture(scope="module")
def filler() -> StructuredFiller:
    return StructuredFiller("", VOCABULARY)


def written(filler: StructuredFiller, grammar: str, seed: int, least: int = 0, most: int = 2000) -> str:
    return PlainTexts(VOCABULARY).decode(filler.write(grammar, seed, least, most))


def test_json_follows_its_schema(filler: StructuredFiller) -> None:
    for seed in range(20):
        person = json.loads(written(filler, json_grammar(PERSON), seed))
        assert set(person) == set(PERSON["properties"])
        assert len(person["name"]) <= 12 and 0 <= person["age"] <= 150
        assert len(person["skills"]) >= 2 and all(isinstance(skill, str) for skill in person["skills"])
        assert person["kind"] in PERSON["properties"]["kind"]["enum"]


@pytest.mark.parametrize("pattern", [r"[a-z]+@[a-z]+\.(com|org)", r"\d{3}-\d{4}", "yes|no|perhaps", "(ab)+c?"])
def test_a_text_matches_its_expression(filler: StructuredFiller, pattern: str) -> None:
    texts = [written(filler, regex_grammar(pattern), seed) for seed in range(20)]
    assert all(re.fullmatch(pattern, text) for text in texts) and len(set(texts)) > 1


def test_a_text_that_may_be_empty_has_a_token(filler: StructuredFiller) -> None:
    assert {written(filler, regex_grammar("(yes)?"), seed) for seed in range(10)} == {"yes"}
    with pytest.raises(UserError, match="only the empty text"):
        written(filler, regex_grammar(""), 1)


def test_a_text_follows_rules(filler: StructuredFiller) -> None:
    for seed in range(10):
        text = written(filler, grammar_of_rules(RULES), seed)
        assert re.fullmatch(r"SELECT (one|two) WHERE (one|two) = \d+", text)


def test_the_seed_decides_and_lengths_are_kept_to(filler: StructuredFiller) -> None:
    grammar = json_grammar(PERSON)
    assert len({written(filler, grammar, seed) for seed in (1, 1, 2, 3)}) == 3
    whole = filler.write(grammar, 1, 0, 2000)
    assert filler.write(grammar, 1, 0, 10) == whole[:11]  # one more than asked for: it goes on
    assert len(filler.write(regex_grammar("[a-z]+"), 1, 40, 2000)) >= 40
