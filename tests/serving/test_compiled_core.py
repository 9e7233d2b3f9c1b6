"""A compiled core is used only if it was made from the very sources that are here, and nobody forbids it."""

import sys
from pathlib import Path

import pytest

from tokentwin.serving import compiled_core
from tokentwin.serving.compiled_core import BY_CHOICE, COMPILED_CORE, DIGEST, SUFFIX, sources_digest


def test_only_a_core_of_these_sources_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_core, "COMPILED", tmp_path)
    monkeypatch.setattr(sys, "meta_path", finders := [])
    monkeypatch.setenv("TOKENTWIN_PURE", "0")
    assert "is not compiled; run `make core`" in compiled_core._use()
    (tmp_path / DIGEST).write_text("of others")
    assert "other sources" in compiled_core._use() and not finders
    (tmp_path / DIGEST).write_text(sources_digest())
    for said in ("1", "true"):
        monkeypatch.setenv("TOKENTWIN_PURE", said)
        assert compiled_core._use() == BY_CHOICE and not finders
    monkeypatch.setenv("TOKENTWIN_PURE", "")
    (module := tmp_path / "tokentwin" / "serving" / f"request{SUFFIX}").parent.mkdir(parents=True)
    module.touch()
    assert compiled_core._use() == COMPILED_CORE
    assert finders[0].find_spec("tokentwin.serving.request").origin == str(module)
    assert finders[0].find_spec("tokentwin.serving.workload") is None


def test_an_edited_source_has_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_core, "ROOT", tmp_path)
    for package in ("serving", "sim"):
        (tmp_path / package).mkdir()
    (source := tmp_path / "sim" / "clock.py").write_text("NOW = 1\n")
    before = sources_digest()
    source.write_text("NOW = 2\n")
    assert sources_digest() != before
