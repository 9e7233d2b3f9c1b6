"""The last line of a run of the tests says that no page was tested, if there is no browser."""

from pathlib import Path
from types import SimpleNamespace

from tests.dashboard import browser


def test_it_says_how_many_tests_need_chromium_and_how_to_get_it(monkeypatch, tmp_path):
    reports = [SimpleNamespace(keywords=dict.fromkeys(marks)) for marks in (["browser"], [], ["browser"])]
    monkeypatch.setattr(browser, "CHROMIUM", tmp_path / "none")
    line = browser.skipped_without_it(reports)
    assert "2 browser tests need chromium: apt-get install chromium" in line and "\n" not in line
    assert browser.skipped_without_it(reports[1:2]) == ""
    monkeypatch.setattr(browser, "CHROMIUM", Path(__file__))
    assert browser.skipped_without_it(reports) == ""
