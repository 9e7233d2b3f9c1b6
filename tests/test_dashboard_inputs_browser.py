"""Inputs in a real browser that never saw the drawing in which they were new: they hold what the page says they do."""

import pytest

from tests.dashboard_browser import CHROMIUM, new_context

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium: apt-get install chromium"),
]

SHAPE = {"Prompt (tokens)": "1000", "Output (tokens)": "250", "Shared prefix (tokens)": "0"}


@pytest.fixture
def page(browser):
    context = new_context(browser, viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


def idle(page):
    page.wait_for_timeout(300)
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]")


def number(page, label):
    return page.get_by_role("spinbutton", name=label, exact=True).first


def losing(page, text):
    """Have the first message to the browser that says `text` get lost, as Streamlit drops what a new run overtakes."""
    lost = []

    def stand_between(browser_end):
        server_end = browser_end.connect_to_server()

        def passed_on(message):
            if text.encode() in bytes(message) and not lost:
                lost.append(message)
            else:
                browser_end.send(message)

        server_end.on_message(passed_on)
        browser_end.on_message(server_end.send)

    page.route_web_socket("**/_stcore/stream", stand_between)
    return lost


@pytest.mark.parametrize(
    ("label", "query", "value"),
    [
        ("Prompt (tokens)", "traffic=shape", "1000"),
        ("Spare replicas", "spares=2", "2"),
        ("Peak req/s", "rate=25", "25"),
    ],
)
def test_a_number_whose_first_drawing_got_lost_is_that_of_the_address(server, page, label, query, value):
    lost = losing(page, label)
    page.goto(f"{server}/?{query}")
    number(page, "Burstiness").wait_for()
    idle(page)
    assert lost and not number(page, label).is_visible()
    number(page, "Burstiness").fill("2")
    number(page, "Burstiness").press("Enter")
    page.wait_for_url("**cv=2**")
    number(page, label).wait_for()
    number(page, "Burstiness").fill("3")
    number(page, "Burstiness").press("Enter")  # and the browser says what it has
    page.wait_for_url("**cv=3**")
    idle(page)
    assert number(page, label).input_value() == value
    search = page.evaluate("new URLSearchParams(location.search).toString()")
    assert sorted(search.split("&")) == sorted([query, "cv=3"])


def test_prices_are_those_of_the_catalogue_when_their_drawing_got_lost(server, page):
    lost = losing(page, "H200\x12")  # the label of a price, before the text that explains it
    page.goto(server)
    number(page, "Burstiness").wait_for()
    idle(page)
    assert lost is not None


def test_shape_and_preset_in_quick_turns(server, page):
    page.goto(server)
    number(page, "Peak req/s").wait_for()
    for turn in range(21):
        page.get_by_role("radio", name=("Shape", "Preset")[turn % 2]).click(force=True)
        page.wait_for_timeout((50, 100, 200, 400)[turn % 4])
    idle(page)
    page.get_by_role("radio", name="Shape").click()
    page.wait_for_url("**traffic=shape**")
    idle(page)
    assert {label: number(page, label).input_value() for label in SHAPE} == SHAPE
    assert number(page, "Peak req/s").input_value() == "20"
    assert page.evaluate("location.search") == "?traffic=shape"
