"""Plotly without the kinds of traces that no page draws: two thirds of the script that a browser reads first.

Streamlit serves all of plotly.js as one module, which esbuild made of CommonJS modules: `name=_({"path"(e,t){...}}),`.
Each runs when another calls `name()`. The last module, `lib/index.js`, registers the kinds of traces. `lighter`
registers only the kinds that pages draw, and leaves out modules that nothing reaches any more. A script of another form
is returned unchanged.
"""

from __future__ import annotations

import re

TRACES = frozenset({"bar", "heatmap"})  # kinds besides scatter, which is part of Plotly's core
_MODULE = re.compile(r'(?<=[, ])([\w$]+)=[\w$]\(\{"([^"]+)"\(')
_REGISTERED = re.compile(r"\.register\(\[((?:[\w$]+\(\),?)+)\]\)")
_CALL = re.compile(r"(?<![\w$.])([\w$]+)\(\)")
_END = "}}),"  # end of a module that is followed by the next at once
_INDEX = '({"lib/index.js"('


def lighter(script: str) -> str:
    """Return Streamlit's `PlotlyChart.*.js` with the traces of `TRACES` alone."""
    registered, modules = _REGISTERED.search(script), list(_MODULE.finditer(script))
    index = script.rfind(_INDEX)
    if registered is None or not modules or not modules[0].start() < index < registered.start():
        return script
    paths = {module[1]: module[2] for module in modules}
    names = registered[1].replace("()", "").split(",")
    wanted = [name for name in names if paths.get(name) in {f"lib/{trace}.js" for trace in TRACES}]
    if len(wanted) < len(TRACES):
        return script
    ends = [*(module.start() for module in modules[1:]), index]
    texts = {module[1]: script[module.start() : end] for module, end in zip(modules, ends, strict=True)}
    reached = _reached(texts, [*wanted, *_CALL.findall(script[index : registered.start()])])
    left = (text for name, text in texts.items() if name in reached or not text.endswith(_END))
    after = script[index : registered.start(1)], script[registered.end(1) :]
    return "".join([script[: modules[0].start()], *left, after[0], ",".join(f"{name}()" for name in wanted), after[1]])


def _reached(texts: dict[str, str], first: list[str]) -> set[str]:
    reached, pending = set[str](), first
    while pending:
        name = pending.pop()
        if name in texts and name not in reached:
            reached.add(name)
            pending += _CALL.findall(texts[name])
    return reached
