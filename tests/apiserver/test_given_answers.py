"""A twin with a tokenizer and answers that its operator gives."""

import json

import pytest

from tests.apiserver.served import TWIN, serving
from tests.realengine.tiny_chat_model import save_tokenizer
from tokentwin.apiserver.backends import tokenizer_folder
from tokentwin.apiserver.openai_api.given_answers import read_answers
from tokentwin.serving.errors import UserError


def test_clients_get_the_answers_of_the_file(tmp_path):
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps({"What is 2+2?": "It is 4.", "": "I do not know."}))
    options = ("--tokenizer", save_tokenizer(tmp_path / "tokenizer"), "--answers", answers)
    with serving(tmp_path, *TWIN, *options) as server:
        question = [{"role": "user", "content": "What is 2+2?"}]
        for stream in (False, True):
            answered = server.chat(messages=question, stream=stream, max_tokens=50)
            texts = [event["choices"][0]["delta"].get("content", "") for event in answered.events] if stream else []
            assert ("".join(texts) if stream else answered.choice["message"]["content"]) == "It is 4."
        assert server.complete(prompt="What is 2+2?", max_tokens=50).choice["text"] == "It is 4."
        cut = server.complete(prompt="And 3?", max_tokens=5).choice
        assert (cut["text"], cut["finish_reason"]) == ("I do ", "length")
        whole = server.complete(prompt="And 3?", max_tokens=50)
        assert whole.choice["finish_reason"] == "stop" and whole.document["usage"]["completion_tokens"] == 14
        exact = server.complete(prompt="And 3?", max_tokens=50, ignore_eos=True)
        assert exact.document["usage"]["completion_tokens"] == 50
        assert server.ask("POST", "/tokenize", {"prompt": "Hello"}).document["count"] == 5
        in_json = {"response_format": {"type": "json_object"}, "max_tokens": 50}
        assert server.chat(messages=question, **in_json).choice["message"]["content"] == "It is 4."


def test_an_echo_repeats_the_prompt(tmp_path):
    options = ("--tokenizer", save_tokenizer(tmp_path / "tokenizer"), "--answers", "echo")
    with serving(tmp_path, *TWIN, *options) as server:
        assert server.complete(prompt="What is 2?", max_tokens=50).choice["text"] == "What is 2?"
        tokens = server.ask("POST", "/tokenize", {"prompt": "And 3?"}).document["tokens"]
        assert server.complete(prompt=tokens, max_tokens=50).choice["text"] == "And 3?"
        assert server.chat(max_tokens=50).choice["message"]["content"] == "Hello"


def test_no_answers_are_given_unless_they_are_named():
    assert read_answers("") is None


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', "{", '"echo"'])
def test_a_file_without_answers_is_refused(tmp_path, text):
    path = tmp_path / "answers.json"
    path.write_text(text)
    with pytest.raises(UserError, match="answers"):
        read_answers(str(path))


def test_a_tokenizer_comes_from_an_installed_package(tmp_path, monkeypatch):
    files = ["words-1.dist-info/METADATA", "words-1.dist-info/RECORD", "words/a/tokenizer.json"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("Name: words\nVersion: 1\n")
    record = tmp_path / files[1]
    record.write_text("".join(f"{name},,\n" for name in files))
    monkeypatch.syspath_prepend(tmp_path)
    assert tokenizer_folder("words", "") == str(tmp_path / "words" / "a")
    record.write_text("".join(f"{name},,\n" for name in [*files, "words/b/tokenizer.json"]))
    with pytest.raises(UserError, match="has several"):
        tokenizer_folder("words", "")
    with pytest.raises(UserError, match="installed package"):
        tokenizer_folder("no-such-package", "")
