"""Back and forward in a real browser: one change by a person is one step back to the page as it was."""

from urllib.parse import quote

import pytest

from tests.dashboard.browser import NEEDED, without_plots
from tests.dashboard.samples import plan_example

pytestmark = NEEDED


@pytest.fixture
def page(page, request):
    return page if "plots" in request.node.name else without_plots(page)


def idle(page):
    page.wait_for_timeout(300)
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]")


def address(page):
    """Return the browser's own address; Playwright's `page.url` follows a moment later."""
    return page.evaluate("location.href")


def rate(page, wanted=None):
    """Return the rate that the page shows, once it is `wanted`."""
    field = page.get_by_role("spinbutton", name="Peak req/s")
    field.wait_for()
    if wanted is not None:
        page.wait_for_function(
            "wanted => document.querySelector('input[aria-label=\"Peak req/s\"]')?.value === wanted", arg=wanted
        )
        idle(page)
    return field.input_value()


def set_rate(page, value):
    field = page.get_by_role("spinbutton", name="Peak req/s")
    field.fill(value)
    field.press("Enter")
    page.wait_for_url(f"**rate={value}**")
    idle(page)


def test_back_and_forward_are_the_pages_as_they_were(server, page):
    page.goto(f"{server}/?rate=25")
    assert rate(page, "25") == "25"
    set_rate(page, "26")
    page.get_by_role("link", name="Policy lab", exact=True).click()
    page.get_by_text("Is B better than A?").wait_for()
    idle(page)
    page.go_back()
    assert rate(page, "26") == "26"
    page.wait_for_url("**rate=26")
    page.go_back()
    assert rate(page, "25") == "25"
    page.wait_for_url("**rate=25")
    page.go_forward()
    assert rate(page, "26") == "26"
    page.go_forward()
    page.get_by_text("Is B better than A?").wait_for()


@pytest.mark.deep
def test_a_change_of_several_kinds_of_input_is_one_step_each(server, page):
    page.goto(f"{server}/plan")
    rate(page, "20")
    steps = page.evaluate("history.length")
    set_rate(page, "21")
    page.get_by_role("radio", name="Shape").click()
    page.wait_for_url("**traffic=shape**")
    idle(page)
    slos = page.get_by_role("textbox", name="SLOs")
    slos.fill("e2e_ms p99<=30000")
    slos.press("Control+Enter")
    page.wait_for_url("**slo=e2e_ms**")
    idle(page)
    assert page.evaluate("history.length") == steps + 3
    page.go_back()
    page.wait_for_url(lambda url: "slo=" not in url)
    idle(page)
    assert slos.input_value() == "ttft_ms p99<=1000\ntpot_ms p99<=50"
    page.go_back()
    page.get_by_text("Kind of requests").wait_for()
    idle(page)
    page.go_back()
    assert rate(page, "20") == "20"


@pytest.mark.deep
def test_a_part_of_a_page_that_is_drawn_alone_is_one_step_and_names_the_run(server, page):
    page.goto(f"{server}/run")
    page.get_by_text("Select one to see where its time went").first.wait_for()
    idle(page)
    page.wait_for_url("**/run")
    steps = page.evaluate("history.length")
    page.get_by_role("radio", name="Every metric").click()
    page.wait_for_url("**view=metrics**")
    idle(page)
    page.wait_for_url("**run=**")
    assert page.evaluate("history.length") == steps + 1
    page.go_back()
    page.get_by_text("Select one to see where its time went").first.wait_for()
    idle(page)
    page.wait_for_url("**/run")


@pytest.mark.deep
def test_the_first_page_is_found_by_its_name_as_well_and_is_as_it_was_left(server, page):
    page.goto(f"{server}/plan?rate=33")
    assert rate(page, "33") == "33"
    page.wait_for_url("**/plan?*rate=33")
    set_rate(page, "34")
    page.wait_for_url("**/plan?*rate=34")
    page.locator("[data-testid=stTopNavLink][aria-current=page]", has_text="Plan").click()
    assert rate(page, "34") == "34", "the link of the open page changes nothing"
    page.wait_for_url("**/plan?*rate=34")
    page.go_back()
    assert rate(page, "33") == "33"
    page.go_forward()
    assert rate(page, "34") == "34"
    idle(page)
    page.get_by_text("Evidence", exact=True).first.click()
    page.get_by_text("Step", exact=True).first.click()
    page.get_by_role("heading", name="What a step costs").wait_for()
    idle(page)
    page.wait_for_url("**/step")
    page.get_by_role("link", name="Plan", exact=True).click()
    assert rate(page, "34") == "34", "as it was left"
    page.wait_for_url("**rate=34")


@pytest.mark.deep
def test_an_old_link_to_the_frontier_is_a_view_of_the_plan_and_its_fleets_can_be_chosen_in_turn(server, page):
    page.goto(f"{server}/frontier?plan=example")
    page.wait_for_url("**plan=example**show=fleets**")
    idle(page)
    names = [f"{p['replicas']} x {p['engine']}" for p in plan_example()["answer"]["points"]]
    seen = [address(page)]
    for name in (names[0], names[-1]):
        page.goto(f"{server}/?plan=example&show=fleets&fleet={quote(name)}")
        page.locator("p strong", has_text=name.replace(" x ", " \u00d7 ")).wait_for()
        idle(page)
        seen.append(address(page))
    page.go_back()
    page.wait_for_url(seen[-2])
    idle(page)
    fleet = page.evaluate("new URLSearchParams(location.search).get('fleet')")
    page.locator("p strong", has_text=fleet.replace(" x ", " \u00d7 ")).wait_for()
