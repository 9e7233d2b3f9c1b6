"""Traces of requests are kept for the last requests alone, whether or not the others have ended."""

from tokentwin.apiserver.journeys import Journeys


def test_a_journey_that_nobody_can_ask_for_any_more_grows_no_longer() -> None:
    journeys = Journeys(16)
    for id in range(100):
        journeys.begin(id, f"name-{id}", 5, 0)
    journeys.begin(100, "name-99", 5, 0)  # a client may give a name twice
    assert len(journeys._under_way) == len(journeys._by_name) == 64
    assert journeys.find("name-35") is None and journeys.find("name-36") is not None
    journeys.end({"request_id": 99, "status": "finished", "replica": 0})
    journey = journeys.find("name-99")
    assert journey is not None and journey["status"] == "under way"
