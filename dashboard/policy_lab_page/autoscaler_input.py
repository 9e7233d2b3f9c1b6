"""The input of a side's autoscaler, as widgets whose values live in the URL."""

from __future__ import annotations

from typing import Any

import streamlit as st

from tokentwin.dashboard.url import amount, choose, number, switch
from tokentwin.serving.deployments.fleet import AutoscalerConfig
from tokentwin.serving.errors import UserError

_RULES = {"proportional": "proportional", "hpa": "Kubernetes' HPA"}
_SECONDS = {  # fields of the autoscaler, the label of each
    "interval_s": "Review every (s)",
    "scrape_delay_s": "Scrape delay (s)",
    "cold_start_s": "Cold start (s)",
    "cooldown_s": "Stabilise in (s)",
}
_QUEUE = "Waiting requests per ready replica above which the pool grows; 0: the queue does not count."
_KV = (
    "Mean share of KV blocks in use above which the pool grows; 0: KV does not count. With both, the one that wants "
    "more replicas decides."
)


def autoscaler_input(side: str) -> dict[str, Any] | None:
    """Draw the input, and return the changed fields of `fleet.autoscaler`; None without an autoscaler.

    Raises UserError if neither metric has a target.
    """
    if not switch(
        "Autoscaler", f"{side}_scaled", "Adds and removes replicas. *Replicas* says how many there are first."
    ):
        return None
    left, right = st.columns(2)
    with left:
        queue = amount("Queue", f"{side}_queue", 0, 1e6, 4, 1, help=_QUEUE)
        least = number("Fewest", f"{side}_fewest", 0, 1000, 1, help="Fewest replicas; 0: scale to zero.")
    with right:
        kv = amount("KV (%)", f"{side}_kv", 0, 100, 0, 5, help=_KV)
        most = number("Most", f"{side}_most", 1, 1000, 4, help="Most replicas.")
    rule = choose("Rule", list(_RULES), f"{side}_rule", _RULES.__getitem__, _about("rule"))
    targets = {"queue": queue, "kv": kv / 100}
    scaler: dict[str, Any] = {
        "targets": {metric: target for metric, target in targets.items() if target},
        "min_replicas": least,
        "max_replicas": most,
        "rule": rule,
    }
    labels = {**_SECONDS, "scale_out_window_s": "Stabilise out (s)"} if rule == "hpa" else _SECONDS
    for at, (name, label) in enumerate(labels.items()):
        usual = AutoscalerConfig.model_fields[name].default
        lowest = 1 if name == "interval_s" else 0
        with (left, right)[at % 2]:
            scaler[name] = amount(label, f"{side}_{name}", lowest, 1e6, usual, 5, help=_about(name))
    if not any(targets.values()):
        raise UserError("Autoscaler", 0, "must have a target for queue or KV; state one")
    return {name: value for name, value in scaler.items() if value != AutoscalerConfig.model_fields[name].default}


def _about(name: str) -> str:
    about = str(AutoscalerConfig.model_fields[name].description)
    return about[0].upper() + about[1:]
