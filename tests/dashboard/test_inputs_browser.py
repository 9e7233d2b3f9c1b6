"""Inputs in a real browser that never saw the drawing in which they were new: they hold what the page says they do."""

import pytest

from tests.dashboard.browser import NEEDED, without_plots
from tests.dashboard.test_uploads import CSV

pytestmark = NEEDED


@pytest.fixture
def page(page):
    return without_plots(page)


def idle(page):
    page.wait_for_timeout(300)
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]")


def inputs(page):
    """Return what every input shows, by label, closed expanders included."""
    return page.evaluate(
        """() => [...document.querySelectorAll('[data-testid=stMain] input, [data-testid=stSidebar] input')]
            .map(input => [input.ariaLabel ?? '', input.value])"""
    ) + [chosen.inner_text() for chosen in page.locator("[data-testid=stMultiSelect], [role=radio]:checked").all()]


def losing_a_drawing(page, label):
    """Lose the first drawing of `label` and all after it, as Streamlit drops a drawing that a quicker run overtakes."""
    from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

    lost = []

    def stand_between(browser_end):
        server_end = browser_end.connect_to_server()
        over = []

        def passed_on(data):
            message = ForwardMsg.FromString(bytes(data))
            kind = message.WhichOneof("type")
            if kind == "script_finished" and lost:
                over.append(True)
            if kind == "delta" and not over and (lost or label.encode() in bytes(data)):
                lost.append(message)
            else:
                browser_end.send(data)

        server_end.on_message(passed_on)
        browser_end.on_message(server_end.send)

    page.route_web_socket("**/_stcore/stream", stand_between)
    return lost


def drawn_again(page):
    page.locator("body").press("r")
    idle(page)


@pytest.mark.deep
def test_inputs_whose_first_drawing_got_lost_are_those_of_the_address(server, page):
    """The second drawing of every page is enough to begin with: test_links.py."""
    address = "?traffic=shape&rate=25&price=H100%3A2.5"
    page.goto(f"{server}/{address}")
    page.get_by_label("Spare replicas").first.wait_for()
    idle(page)
    expected = inputs(page)
    lost = losing_a_drawing(page, "Traffic")
    page.goto(f"{server}/{address}")
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]")
    idle(page)
    assert lost and not page.get_by_label("Spare replicas").first.is_visible()
    drawn_again(page)
    page.get_by_label("Spare replicas").first.wait_for()
    drawn_again(page)  # and the browser says what it has
    assert inputs(page) == expected
    assert page.evaluate("location.href").endswith(f"&{address[1:]}")


@pytest.mark.deep
def test_shape_and_preset_in_quick_turns(server, page):
    page.goto(f"{server}/plan")
    page.get_by_label("Peak req/s").first.wait_for()
    for turn in range(4):
        page.get_by_role("radio", name=("Shape", "Preset")[turn % 2]).first.click()
        page.wait_for_timeout((50, 100, 200, 400)[turn % 4])
    idle(page)
    # What is chosen before the browser has learnt of the last choice can be undone: where it ends is left open.
    for _ in range(10):
        if not page.get_by_label("Prompt (tokens)").first.is_visible():
            page.get_by_role("radio", name="Shape").first.click()
            idle(page)
    shown = dict(pair for pair in inputs(page) if isinstance(pair, list))
    asked = ("Prompt (tokens)", "Output (tokens)", "Shared prefix (tokens)", "Peak req/s", "H100 ($/h)")
    assert [shown[name] for name in asked] == ["1000", "250", "0", "20", "2.69"]


CLICK = """async ([kind, label, pause]) => {
    const of = {
        more: `[data-testid=stNumberInput]:has(input[aria-label="${label}"]) [data-testid=stNumberInputStepUp]`,
        less: `[data-testid=stNumberInput]:has(input[aria-label="${label}"]) [data-testid=stNumberInputStepDown]`,
        toggle: `input[type=checkbox][aria-label="${label}"]`,
    }
    const radio = () => [...document.querySelectorAll('[role=radio]')].find(one => one.innerText.trim() === label)
    const target = () => kind === 'radio' ? radio() : document.querySelector(of[kind])
    for (let waited = 0; !target(); waited++) {
        if (waited === 3000) throw new Error(`no ${kind} ${label} after a minute`)
        await new Promise(done => setTimeout(done, 20))
    }
    target().click()
    await new Promise(done => setTimeout(done, pause))
}"""
TWENTY = [  # kind of click and label
    *[("more", "Spare replicas")] * 3,
    ("radio", "Users"),
    ("toggle", "Power and energy"),
    *[("more", "Spare replicas")] * 2,
    *[("less", "Must hold in (% of cases)")] * 3,
    ("radio", "Shape"),
    ("toggle", "Power and energy"),
    ("radio", "Rate"),
    *[("more", "First requests")] * 4,  # an input as wide as the sidebar: narrow ones have no buttons
    ("toggle", "Power and energy"),
    *[("less", "Spare replicas")] * 2,
]


def with_late_addresses(page):
    """Keep from the browser the addresses that the page writes; return functions that send them, in order."""
    from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

    late = []

    def stand_between(browser_end):
        server_end = browser_end.connect_to_server()

        def passed_on(data):
            if ForwardMsg.FromString(bytes(data)).WhichOneof("type") == "page_info_changed":
                late.append(lambda: browser_end.send(data))
            else:
                browser_end.send(data)

        server_end.on_message(passed_on)
        browser_end.on_message(server_end.send)

    page.route_web_socket("**/_stcore/stream", stand_between)
    return late


def test_twenty_quick_clicks_lose_none(server, page):
    """The browser learns the address of no click before the last one, and sends its old address with each of them."""
    late = with_late_addresses(page)
    page.goto(f"{server}/plan?spares=1&rate=20")
    page.get_by_label("Spare replicas").first.wait_for()
    idle(page)
    for at, (kind, label) in enumerate(TWENTY):
        page.evaluate(CLICK, [kind, label, 30 + 40 * (at % 3)])
        if at % 5 == 4:
            idle(page)  # this drawing is complete, and writes the address
    idle(page)
    assert len(late) > 2
    for send in late:
        send()
    asked = "Object.fromEntries(new URLSearchParams(location.search))"
    expected = {"traffic": "shape", "spares": "4", "hold": "87", "limit": "400", "energy": "1"}
    page.wait_for_function(f"() => Object.keys({asked}).length === 7")  # and the rate and the plan's hash
    assert page.evaluate(asked).items() >= expected.items()
    shown = dict(pair for pair in inputs(page) if isinstance(pair, list))
    labels = ("Spare replicas", "Must hold in (% of cases)", "First requests")
    assert [shown[name] for name in labels] == ["4", "87", "400"]


@pytest.mark.deep
def test_a_bad_upload_and_a_good_one_leave_the_numbers_as_they_were(server, page):
    page.goto(f"{server}/?traffic=trace&gpus=H100&spares=2&window=300")
    page.get_by_label("Spare replicas").first.wait_for()
    for name, content in (("bad.csv", b"a,b\n1,2\n"), ("good.csv", CSV)):
        page.locator("input[type=file]").set_input_files([{"name": name, "mimeType": "text/csv", "buffer": content}])
        page.wait_for_timeout(150)
    page.wait_for_url("**trace=**")
    page.get_by_role("button", name="Find the fleet").wait_for()
    idle(page)
    drawn_again(page)
    shown = dict(pair for pair in inputs(page) if isinstance(pair, list))
    assert [shown[name] for name in ("Spare replicas", "H100 ($/h)", "Busiest period (s)")] == ["2", "2.69", "300"]
    said = page.evaluate("Object.fromEntries(new URLSearchParams(location.search))")
    assert (
        said.pop("trace")
        and said.pop("plan")
        and said == {"traffic": "trace", "gpus": "H100", "spares": "2", "window": "300"}
    )
