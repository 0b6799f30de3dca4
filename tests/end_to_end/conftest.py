"""A real fleet per test, ended with everything it started; its logs are shown when the test fails."""

from __future__ import annotations

import pytest

from tests.end_to_end.fleet import RealFleet


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if call.when == "call":
        item.failed = outcome.get_result().failed


@pytest.fixture
def fleet(tmp_path, request):
    """A folder with an authority and a server's certificate; the test writes configurations and starts daemons."""
    found = RealFleet(tmp_path)
    try:
        yield found
    finally:
        found.close()
        if getattr(request.node, "failed", True):
            for log in sorted((tmp_path / "log").glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}")
