"""A page in Streamlit's AppTest, and what it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamlit.testing.v1 import AppTest


def opened(page: str, *folders: Path, session: dict[str, Any] | None = None, **link: Any) -> AppTest:
    """Return the page of this name over these folders, drawn once, as a link with these parameters opens it."""
    from streamlit.testing.v1 import AppTest

    def script(page, *folders):
        from importlib import import_module
        from pathlib import Path

        import_module(f"tokentwin.dashboard.{page}_page.page").show(*map(Path, folders))

    app = AppTest.from_function(script, args=(page, *map(str, folders)), default_timeout=300)
    for parameter, value in link.items():
        app.query_params[parameter] = value
    for name, value in (session or {}).items():
        app.session_state[name] = value
    return app.run()


def text(app: AppTest) -> str:
    kinds = ("title", "markdown", "caption", "subheader", "header")
    return "\n".join(str(element.value) for kind in kinds for element in app.get(kind))


def shown(app: AppTest) -> str:
    """Return all words of a page as they are read, without escapes."""
    assert not app.exception
    kinds = ("info", "error", "success", "warning", "code")
    said = "\n".join(str(element.value) for kind in kinds for element in app.get(kind))
    return f"{text(app)}\n{said}".replace("\\", "")


def charts(app: AppTest) -> list[dict[str, Any]]:
    return [json.loads(element.proto.spec) for element in app.get("plotly_chart")]


def parameter(app: AppTest, name: str) -> str:
    value = app.query_params[name]
    return value if isinstance(value, str) else value[0]  # a list in older Streamlits


def worded_alike(answer: Any) -> Any:
    """Return a saved answer with its sentences as one mark: bundled answers keep the wording of their time."""
    if isinstance(answer, dict):
        return {name: worded_alike(value) for name, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [worded_alike(value) for value in answer]
    return "a sentence" if isinstance(answer, str) and " " in answer else answer
