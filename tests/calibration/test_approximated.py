"""Models whose architecture is only approximated: their step times are extrapolated, and their interval is wider."""

from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.serving.deployments.config import Deployment


def test_it_says_so_and_is_wider() -> None:
    known, near = (
        predicted_cost("H100", Deployment(model=name, device="cuda")) for name in ("Llama-3.1-8B", "Apertus-8B")
    )
    assert known.untaught == ""
    assert "MLPs without a gate" in near.untaught
    assert all(a[0] > b[0] and a[1] < b[1] for a, b in zip(known.known_interval, near.known_interval, strict=True))
