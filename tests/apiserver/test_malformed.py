"""Malformed requests get OpenAI's error document, never a 500, and the next good request is answered."""

import gzip
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.apiserver.served import TWIN, serving
from tests.budget import examples

LIMIT = 100_000
JSON = "Content-Type: application/json"
CANARY = "my-secret-prompt"
COMPLETE, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
GOOD = {
    COMPLETE: {"prompt": CANARY, "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 2},
    TOKENIZE: {"prompt": CANARY},
}
WRONG = {
    "a word": "word", "a number": 7.5, "a list": [1], "an object": {"a": 1}, "true": True, "huge": 10**400,
    "1e999": 1e999, "negative": -(10**19), "deep": json.loads("[" * 90 + "]" * 90),
}  # fmt: skip
TAKES = {  # which of those a field does take
    "prompt": {"a word", "a list"}, "stop": {"a word"}, "user": {"a word"}, "stream": {"true"}, "ignore_eos": {"true"},
    "temperature": {"a number"}, "add_special_tokens": {"true"}, "echo": {"true"}, "suffix": set(), "model": {"a word"},
}  # fmt: skip
FIELDS = {
    COMPLETE: (
        "prompt", "model", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos",
        "priority", "user", "stream", "stream_options", "n", "logit_bias", "logprobs", "echo", "suffix", "unheard_of",
    ),
    CHAT: ("messages", "max_completion_tokens", "tools", "top_logprobs", "response_format", "tool_choice"),
    TOKENIZE: ("messages", "add_special_tokens"),
}  # fmt: skip


def head(path=COMPLETE, method="POST", *lines):
    """Return the head of a request with a JSON body, unless a header states another type."""
    kind = [] if method != "POST" or any(line.startswith("Content-Type") for line in lines) else [JSON]
    text = "\r\n".join([f"{method} {path} HTTP/1.1", "Host: a", *kind, *lines, "", ""])
    return text.encode("utf-8", "surrogateescape")


def sent(body, path=COMPLETE, *lines):
    return head(path, "POST", f"Content-Length: {len(body)}", *lines) + body


def corpus():
    """Return the names of bad requests, and their bytes."""
    for path, fields in FIELDS.items():
        for field in fields:
            for name, value in WRONG.items():
                if name in TAKES.get(field, ()) and not (field == "model" and path != TOKENIZE):
                    continue
                yield f"{path} {field}: {name}", sent(json.dumps({**GOOD[path], field: value}).encode(), path)
        for field in GOOD[path]:
            if field != "max_tokens":
                less = {name: value for name, value in GOOD[path].items() if name != field}
                yield f"{path} without {field}", sent(json.dumps(less).encode(), path)
        whole = json.dumps(GOOD[path]).encode()
        for at in range(1, len(whole), 7):
            yield f"{path} cut at {at}", sent(whole[:at], path)
        for name, body in BODIES.items():
            yield f"{path} {name}", sent(body, path)
    for name, content in CONTENTS.items():
        yield f"message {name}", sent(json.dumps({"messages": [content]}).encode(), CHAT)
    for at, path in enumerate(PATHS):
        yield f"path {at}", head(path, "GET")
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"):
        yield f"{method} {COMPLETE}", head(COMPLETE, method)
    yield from HEADS.items()


BODIES = {
    "empty": b"", "no object": b"7", "null": b"null", "a list": b"[]", "a form": b"prompt=Hello&max_tokens=4",
    "not UTF-8": b'{"prompt": "\xff\xfe"}', "half a surrogate": b'{"prompt": "\\ud800"}', "NaN": b'{"prompt": NaN}',
    "twice an object": b"{}{}", "NUL": b'{"prompt": "a\0b"}',
    "deep": b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
    "comments": b'{"prompt": "a"} // so', "UTF-16": '{"prompt": "a"}'.encode("utf-16"), "too long": b" " * (LIMIT + 1),
    "deep objects": b'{"a":' * 20_000, "binary": bytes(range(256)),
    "many digits": b'{"prompt": [' + b"9" * 50_000 + b"]}",
}  # fmt: skip
CONTENTS = {
    "without role": {"content": "a"}, "no role": {"role": "", "content": "a"}, "a role too long": {"role": "a" * 99},
    "an image": {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]},
    "a number": {"role": "user", "content": 7}, "a part of nothing": {"role": "user", "content": [{}]},
    "a list of lists": {"role": "user", "content": [[]]}, "role a list": {"role": ["user"], "content": "a"},
}  # fmt: skip
PATHS = (
    "/", "/v1", "/v2/completions", "/v1/completions/", "/v1/embeddings", "/../etc/passwd", "/%00", "/%ff", "/metrics/x",
    "//v1/models", "/?" + "a=1&" * 1000, "/" + "a" * 7000,
)  # fmt: skip
HEADS = {
    "no HTTP": b"Hello\r\n\r\n",
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",
    "HTTP/9": b"GET / HTTP/9.9\r\n\r\n",
    "a path too long": head("/" + "a" * 20_000, "GET"),
    "a header too long": head(COMPLETE, "GET", "X: " + "a" * 20_000),
    "too many headers": head(COMPLETE, "GET", *(f"X-{at}: a" for at in range(500))),
    "a header of no name": head(COMPLETE, "GET", ": a"),
    "a space before the colon": head(COMPLETE, "GET", "X : a"),
    "a header of control characters": head(COMPLETE, "GET", "X: \x01"),
    "two lengths": head(COMPLETE, "POST", "Content-Length: 5", "Content-Length: 6") + b"hello",
    "a negative length": head(COMPLETE, "POST", "Content-Length: -5"),
    "length and chunks": head(COMPLETE, "POST", "Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    "chunks that are none": head(COMPLETE, "POST", "Transfer-Encoding: chunked") + b"zz\r\nhello\r\n0\r\n\r\n",
    "no gzip": sent(b"hello", COMPLETE, "Content-Encoding: gzip"),
    "half a gzip": sent(gzip.compress(b"hello" * 100)[:20], COMPLETE, "Content-Encoding: gzip"),
    "a bomb": sent(zlib.compress(b" " * 50_000_000), COMPLETE, "Content-Encoding: deflate"),
    "length of a word": head(COMPLETE, "POST", "Content-Length: five"),
    "an expectation": head(COMPLETE, "POST", "Expect: wonders", "Content-Length: 2") + b"{}",
    "no multipart": sent(b"--a\r\n", COMPLETE, "Content-Type: multipart/form-data; boundary=a"),
    "a body of no length": head(COMPLETE, "POST") + b'{"prompt": "a"}',
}
CORPUS = dict(corpus())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("twin"), *TWIN, "--speed", 1000, "--body-limit", LIMIT) as server:
        yield server
        assert "Traceback" not in server.said and CANARY not in server.said


def refused(answer):
    """Return the status of an answer, which must be a refusal in OpenAI's form."""
    answered, _, body = answer.partition(b"\r\n\r\n")
    status = int(answered.split()[1])
    assert 400 <= status < 500, answer
    (error,) = json.loads(body).values()
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert error["message"] and "should" not in error["message"], "a library's words"
    assert "Traceback" not in body.decode() and CANARY not in body.decode()
    return status


def test_the_corpus_is_large():
    assert len(CORPUS) >= 300


def test_every_malformed_request_is_refused_and_the_next_is_answered(server):
    wrong = {}
    for name, data in CORPUS.items():
        try:
            refused(server.raw(data))
        except Exception as error:
            wrong[name] = repr(error)
    assert not wrong
    assert server.complete().status == server.chat().status == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


names = st.sampled_from(sorted({name for fields in FIELDS.values() for name in fields}))


@given(st.sampled_from(sorted(GOOD)), st.dictionaries(names, json_values))
@examples(2)
def test_any_document_is_answered_or_refused(server, path, fields):
    asked = {**GOOD[path], **fields, **({"max_tokens": 2} if path != TOKENIZE else {}), "stream": False}
    answer = server.raw(sent(json.dumps(asked).encode(), path))
    if answer.split()[1] != b"200":
        refused(answer)


@given(st.sampled_from(sorted(GOOD)), st.binary(max_size=300))
@examples(1)
def test_any_bytes_are_refused(server, path, body):
    refused(server.raw(sent(body, path)))


@given(st.sampled_from(sorted(GOOD)), st.data())
@examples(1)
def test_a_flipped_byte_is_answered_or_refused(server, path, data):
    whole = bytearray(sent(json.dumps(GOOD[path]).encode(), path))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    answer = server.raw(bytes(whole), ends=True)
    if answer and answer.split()[1] != b"200":
        refused(answer)
    assert server.ask("GET", "/health").status == 200
