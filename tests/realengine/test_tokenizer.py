"""Tokenizers, chat templates and the incremental detokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="the engine extra is not installed")

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Built

from tokentwin.realengine.tokenizer import Detokenizer, Tokenizer
from tokentwin.serving.errors import UserError

pytestmark = pytest.mark.engine

MULTIBYTE = "abé漢😺 \ufffd"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


def byte_level() -> Built:
    """A tokenizer with one token a byte, to which GPT-2, Llama 3, Qwen and SmolLM fall back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Built(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>", "<s>")])
    return built


def byte_fallback() -> Built:
    """Words and bytes, as Llama 2 and Mistral have them: a byte beside an unfinished character decodes differently."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b"]
    vocab = {word: id for id, word in enumerate(words)}
    built = Built(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens([AddedToken("<s>", special=True)])
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return built


BUILT = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


def folder_with(folder: Path, built: Built, **config: Any) -> Path:
    built.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def pieces_of(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each token gives until a stop string, and the text that the end gives."""
    pieces = []
    for id in ids:
        pieces.append(detokenizer.push(id))
        if detokenizer.stopped:
            break
    return [*pieces, detokenizer.finish()]


def cut(text: str, data: st.DataObject) -> tuple[list[int], Any]:
    """Return `text` as tokens of random byte runs, and their decoder: the worst case of a vocabulary."""
    raw = text.encode()
    marks = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)))))
    runs = [raw[a:b] for a, b in zip([0, *marks], [*marks, len(raw)], strict=True)]
    return list(range(len(runs))), lambda ids: b"".join(runs[id] for id in ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("kind", BUILT)
@given(text=st.text(alphabet=MULTIBYTE, max_size=25))
@example(text="😺😺é漢")
def test_pieces_make_up_the_decoded_whole(kind: str, text: str) -> None:
    built = BUILT[kind]
    ids = built.encode(text).ids
    pieces = pieces_of(Detokenizer(built.decode), ids)
    assert "".join(pieces) == built.decode(ids).rstrip("\ufffd")
    assert "\ufffd" in text or "\ufffd" not in "".join(pieces)


@given(st.text(max_size=30), st.data())
def test_pieces_make_up_the_text_however_it_is_cut(text: str, data: st.DataObject) -> None:
    ids, decode = cut(text, data)
    assert "".join(pieces_of(Detokenizer(decode), ids)) == text.rstrip("\ufffd")


@given(st.binary(max_size=20))
def test_bytes_that_are_no_text_come_out_as_the_whole_does(raw: bytes) -> None:
    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    assert "".join(pieces_of(Detokenizer(decode), raw)) == decode(raw).rstrip("\ufffd")


@given(
    st.text(alphabet="abé😺", max_size=20),
    st.lists(st.text(alphabet="abé😺", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_text_ends_before_the_stop_string_completed_first(text: str, stops: list[str], data: st.DataObject) -> None:
    ids, decode = cut(text, data)
    detokenizer = Detokenizer(decode, stops)
    given_text = "".join(pieces_of(detokenizer, ids))
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    assert detokenizer.stopped == bool(ends)
    assert given_text == (text[: min(ends)[1]] if ends else text)


def test_text_is_given_as_soon_as_it_is_certain() -> None:
    runs = ["Hel", "lo", " EN", "D?", " E", "ND", "more"]
    detokenizer = Detokenizer(lambda ids: "".join(runs[id] for id in ids), [" END!", " END", ""])
    assert [detokenizer.push(id) for id in range(3)] == ["Hel", "lo", ""]
    assert not detokenizer.stopped
    assert detokenizer.push(3) == ""
    assert detokenizer.stopped
    assert [detokenizer.push(4), detokenizer.finish()] == ["", ""]


def test_half_a_character_at_the_end_is_dropped_and_half_a_stop_string_is_not() -> None:
    built = BUILT["byte_level"]
    ids = built.encode("stop😺").ids
    assert "".join(pieces_of(Detokenizer(built.decode), ids[:-1])) == "stop"
    assert "".join(pieces_of(Detokenizer(built.decode, ["stopped"]), ids[:4])) == "stop"


@pytest.mark.parametrize("text", ["", "Größe 12345 naïve 😺\n  def f(x):\n\treturn x", "漢字 and <s> text"])
def test_text_round_trips(text: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder_with(tmp_path, byte_level()))
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<s>", "")


CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RENDERED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "template", [CHATML, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]]
)
def test_a_template_in_the_config_is_the_one_in_the_file(template: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder_with(tmp_path, byte_level(), chat_template=template))
    wanted = byte_level().encode(RENDERED, add_special_tokens=False).ids
    assert tokenizer.chat(CHAT) == wanted
    (tmp_path / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer(tmp_path).chat(CHAT) == wanted


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "lstrip": False}])
def test_a_template_knows_the_special_tokens(bos: Any, tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = Tokenizer(folder_with(tmp_path, byte_level(), chat_template=template, bos_token=bos))
    assert tokenizer.chat(CHAT) == byte_level().encode("<s>Be brief.Why?", add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{% if %}", "refuses them"),
        ("{{ messages[0].content + 3 }}", "refuses them"),
        ("{{ messages.__class__.__mro__ }}", "refuses them"),
    ],
)
def test_a_template_that_refuses_is_one_line(template: str, says: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder_with(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(UserError, match=says) as caught:
        tokenizer.chat(CHAT)
    assert "\n" not in str(caught.value)


def test_without_a_template_a_chat_is_plain_text_after_the_begin_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder_with(tmp_path, byte_fallback()))
    ids = tokenizer.chat(CHAT)
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "Be brief.\nWhy?\n"
    assert tokenizer.encode("ab")[0] != 1


def test_chats_are_rendered_as_transformers_renders_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    template = (
        "{%- for message in messages %}\n    {%- if loop.index0 > 5 %}{% break %}{%- endif %}\n"
        "  {{ message.role | upper }}: {{ message.content | trim }}\n{% endfor %}\n{{ eos_token }}"
    )
    folder = folder_with(tmp_path, byte_level(), chat_template=template, eos_token="<|im_end|>")
    judge = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=template, eos_token="<|im_end|>"
    )
    wanted = judge.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert Tokenizer(folder).chat(CHAT) == judge(wanted, add_special_tokens=False).input_ids


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_files_are_one_line(file: str, content: str, tmp_path: Path) -> None:
    folder_with(tmp_path, byte_level())
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=file) as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
