"""An agent is upgraded, which is restarted, again and again under load: clients notice nothing, engines stay the same.

The default test takes some seconds, since that is what three starts of an agent take.
"""

from __future__ import annotations

import pytest

from tests.end_to_end.fleet import QUICK, fake_model, until
from tests.end_to_end.load import Load


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_f71_an_agent_restarted_under_load_fails_no_request(fleet, times):
    """F71: the same pids and attempts after each restart, and no client saw anything."""
    fleet.write_server(fake_model("m", 2), timing=QUICK.replace("lost_after: 5s", "lost_after: 60s"))
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    before = {(shard["id"], shard["pid"], shard["attempt"]) for shard in fleet.ready(count=2)}
    load = Load(fleet)
    for link in range(2, times + 2):
        assert fleet.end("n1") == 0
        fleet.start_agent("n1")
        until(lambda link=link: fleet.log("server").count("n1 is linked from") == link, "it is back")
        assert {(shard["id"], shard["pid"], shard["attempt"]) for shard in fleet.ready(count=2)} == before
    load.end()
