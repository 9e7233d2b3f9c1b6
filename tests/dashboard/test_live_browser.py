"""The Live page before a twin that answers, in a real browser."""

import re

from tests.apiserver.served import TWIN, serving
from tests.dashboard.browser import NEEDED

pytestmark = NEEDED


def test_a_prompt_travels_through_a_twin_and_its_waterfall_is_drawn(server, page, tmp_path):
    with serving(tmp_path, *TWIN, "--replicas", 2) as twin:
        page.goto(f"{server}/live?server={twin.url}")
        page.get_by_text("a twin: scheduling is that").wait_for()
        page.get_by_text("running (requests)").first.wait_for()
        page.get_by_role("button", name="Send").click()
        page.get_by_text(re.compile(r"\d+ prompt tokens, 64 steps, on replica [01]: finished")).wait_for()
        for phase in ("tokenise", "queue", "prefill", "decode", "detokenise", "stream"):
            page.locator(".ytick", has_text=phase).first.wait_for()
        page.get_by_text("KV blocks of this request").first.wait_for()
        assert not page.get_by_role("alert").count()
    page.get_by_text("does not answer").first.wait_for()  # once it has ended, the page says so
