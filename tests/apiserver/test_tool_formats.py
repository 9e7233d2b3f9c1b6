"""Tool calls that models write in their own formats, however the text is split."""

import json

import pytest

from tokentwin.apiserver.live_metrics import LiveMetrics
from tokentwin.apiserver.messages import Asked
from tokentwin.apiserver.openai_api.tool_formats import CallReader, format_of
from tokentwin.apiserver.openai_api.tools import ChosenCalls

SCHEMAS = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    "null": {"properties": None},
    "list": {"properties": ["a"]},
}
F, G = ("f", {"a": 1}), ("g", {})
CASES = [
    ("hermes", 'Sure.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "Sure.", [F]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        "",
        [F, G],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [F]),
    ("hermes", "1 < 2 <tool_ca", "1 < 2 <tool_ca", []),
    ("hermes", "<tool_call>{bad}</tool_call>", "<tool_call>{bad}</tool_call>", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [F, G]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [F]),
    ("llama3_json", '{"a": 1} is JSON', '{"a": 1} is JSON', []),
    ("llama3_json", '{"name": "Alice", "age": 3}', '{"name": "Alice", "age": 3}', []),
    ("llama3_json", '{"name": "f"}', "", [("f", {})]),
    *(
        (
            "qwen3_coder",
            f"<tool_call><function={name}><parameter=a>1</parameter></function></tool_call>",
            "",
            [(name, {"a": "1"})],
        )
        for name in ("null", "list")
    ),
    ("llama3_json", 'See {"name": "f"}', 'See {"name": "f"}', []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", [F, G]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', "", [F, G]),
    ("mistral", "a list [x]", "a list [x]", []),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [("f", {"a": 1, "b": "2"})],
    ),
]


@pytest.mark.parametrize("name, text, said, calls", CASES)
@pytest.mark.parametrize("size", [1, 3, 10, 1000])
def test_calls_and_text_are_told_apart(name, text, said, calls, size):
    reader, heard, read = CallReader(name, SCHEMAS), "", []
    for at in range(0, len(text), size):
        more, new = reader.push(text[at : at + size], at + size >= len(text))
        heard, read = heard + more, read + new
    assert (heard, [(call.name, json.loads(call.arguments)) for call in read]) == (said, calls)


@pytest.mark.parametrize(
    "name, form", [("llama3_json", "%s"), ("hermes", "<tool_call>%s"), ("mistral", "[TOOL_CALLS][%s")]
)
def test_what_is_nested_too_deeply_is_text(name: str, form: str) -> None:
    text = form % ('{"a":' * 100_000)
    for over in (True, False):
        said, calls = CallReader(name, {}).push(text, over)
        assert not calls and text.startswith(said) and (said == text or not over)
    written = f"<tool_call><function=f><parameter=a>{text}</parameter></function></tool_call>"
    (call,) = CallReader("qwen3_coder", SCHEMAS).push(written, True)[1]
    assert json.loads(call.arguments) == {"a": text}


def test_each_text_that_is_read_is_counted_as_vllm_does():
    counted = []
    calls = ChosenCalls("hermes", {}, lambda *labels: counted.append((*labels, "responses", 2)))
    calls.delta(0, "a", False)
    calls.delta(0, '<tool_call>{"name": "g"}</tool_call>', True)
    calls.message(1, "b")
    expected = [("streaming", "no_tool_call"), ("streaming", "tool_call"), ("non_streaming", "no_tool_call")]
    assert [one[:2] for one in counted] == expected
    metrics = LiveMetrics("m", 8)
    for _ in range(2):
        metrics.asked(Asked([], counted))
    labels = 'model_name="m",mode="streaming",outcome="tool_call",request_type="responses"'
    assert f"vllm:tool_call_parser_invocations_total{{{labels}}} 4\n" in metrics.text([], records=False).decode()


def test_text_is_passed_on_as_soon_as_it_cannot_be_a_call():
    reader = CallReader("hermes", {})
    assert reader.push("a <b", False) == ("a <b", []) and reader.push(" <tool", False) == (" ", [])
    assert reader.push("box", False) == ("<toolbox", [])


def test_a_chat_template_shows_its_format():
    shown = ["x <tool_call> y", "<tool_call><function=", "[TOOL_CALLS]", "<|python_tag|>", "no tools"]
    assert list(map(format_of, shown)) == ["hermes", "qwen3_coder", "mistral", "llama3_json", ""]
