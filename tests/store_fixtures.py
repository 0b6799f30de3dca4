"""Fixtures of the store's tests: an address of a new store on each database, and stores that are closed again."""

from __future__ import annotations

import pytest
import pytest_twisted

from llmgw.store.sql import SqlStore
from llmgw.testing.postgres import Postgres, programs
from tests.ports import free_port

needs_postgres = pytest.mark.skipif(
    programs() is None, reason="PostgreSQL's server is not installed (apt-get install postgresql)"
)


@pytest.fixture(scope="session")
def postgres():
    """One PostgreSQL server for all tests."""
    server = Postgres(free_port())
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=needs_postgres)])
def url(request, tmp_path):
    """The address of a store that is not there yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/state/llmgw.db"
    return request.getfixturevalue("postgres").database()


@pytest_twisted.async_yield_fixture()
async def stores():
    """Makes stores; closes those that the test left open."""
    from twisted.internet import reactor

    made = []

    def make(url: str, **options) -> SqlStore:
        made.append(SqlStore(url, reactor, **options))
        return made[-1]

    yield make
    for store in made:
        if not store.closed:
            await store.close()
