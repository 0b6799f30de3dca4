"""A key's new secret beside the old one: in the router, in the server, and what people are told."""

from __future__ import annotations

import time

import pytest
import pytest_twisted
from attrs import evolve

from llmgw.router.table import KeyEntry, key_digest
from llmgw.testing.scripted_engine import ScriptedEngine
from tests.router_rig import Rig
from tests.test_admin_api import refused, rig_of  # noqa: F401


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.stop()


def script(talk):
    while talk.request():
        talk.answer(b'{"usage":{"prompt_tokens":5,"completion_tokens":2}}')


def test_old_secret_is_good_until_its_end(rig):
    """The end is by the clock, not by a new table; the limits are those of the key, whichever secret is used."""
    with ScriptedEngine(script) as engine:
        now = time.time()
        old = ((key_digest("old"), now + 1.0), (key_digest("older"), now - 1.0))
        rig.use(engine, keys=(KeyEntry("k1", key_digest("new"), name="ann", rpm=3, old=old),))
        assert [rig.post(key=key)[0] for key in ("new", "old")] == [200, 200]
        status, head, body = rig.post(key="older")
        assert (status, head["x-llmgw-reason"]) == (401, "key_expired")
        assert b"ann was replaced by a new secret, and this one has expired" in body
        with rig.client() as client:
            client.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer old\r\n\r\n")
            assert client.answer()[0] == 200
            while time.time() <= now + 1.0:
                client.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer old\r\n\r\n")
                client.answer()
            client.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer old\r\n\r\n")
            assert client.answer()[0] == 401, "also for a client that is connected already"
        assert [rig.post(key="new")[0] for _ in range(2)] == [200, 429], "three requests, whoever made them"


def test_a_key_that_expires_takes_its_old_secret_along(rig):
    """An overlap is no longer life."""
    with ScriptedEngine(script) as engine:
        now = time.time()
        entry = KeyEntry("k1", key_digest("new"), expires=now - 1, old=((key_digest("old"), now + 60),))
        rig.use(engine, keys=(entry,))
        assert [rig.post(key=key)[0] for key in ("new", "old")] == [401, 401]


@pytest_twisted.ensureDeferred
async def test_rotation_is_kept_and_shown(rig_of):  # noqa: F811
    """The id and the limits stay, the secret is another, its hash alone is kept; what is past is forgotten."""
    rig = await rig_of()
    made = await rig.post("/v1/keys", name="ann", rpm=10)
    turned = await rig.post("/v1/keys/rotate", name="ann", overlap=3600)
    assert (turned["id"], turned["rpm"]) == (made["id"], 10)
    assert turned["key"] != made["key"] and turned["key"].startswith(made["id"] + ".")
    (entry,) = rig.routers.routing.keys
    assert entry.digest == key_digest(turned["key"])
    assert [digest for digest, _ in entry.old] == [key_digest(made["key"])]
    (listed,) = (await rig.get("/v1/keys"))["keys"]
    assert 3500 < listed["old_until"] - time.time() <= 3600 and "old" not in listed
    again = await rig.post("/v1/keys/rotate", name=made["id"], overlap=0)
    (entry,) = rig.routers.routing.keys
    assert entry.digest == key_digest(again["key"])
    assert [digest for digest, _ in entry.old] == [key_digest(made["key"])], "no overlap leaves nothing behind"
    await rig.stop()
    rig.make()
    await rig.start()
    (kept,) = rig.server.keys.list()
    assert kept.digest == key_digest(again["key"]) and len(kept.old) == 1, "it is in the store"


@pytest_twisted.ensureDeferred
async def test_rotation_that_cannot_be(rig_of):  # noqa: F811
    """A name that nobody has, that two have, or whose key has ended."""
    rig = await rig_of()
    assert (await refused(rig.post("/v1/keys/rotate", name="ann"))).status == 404
    one = await rig.post("/v1/keys", name="ann")
    two = await rig.post("/v1/keys", name="ann")
    told = await refused(rig.post("/v1/keys/rotate", name="ann"))
    assert told.status == 409 and one["id"] in str(told) and two["id"] in str(told)
    await rig.post("/v1/keys/revoke", id=one["id"])
    assert (await rig.post("/v1/keys/rotate", name="ann"))["id"] == two["id"], "a revoked one of that name is not in the way"
    assert (await refused(rig.post("/v1/keys/rotate", name=one["id"]))).status == 409


@pytest_twisted.ensureDeferred
async def test_revoked_by_name_or_id(rig_of):  # noqa: F811
    """As a rotation: a name will do where it is one key's; of several the answer has the ids. What has ended shows as that."""
    rig = await rig_of()
    one, two, brief = [await rig.post("/v1/keys", name=name) for name in ("ann", "ann", "brief")]
    told = await refused(rig.post("/v1/keys/revoke", id="ann"))
    assert told.status == 409 and one["id"] in str(told) and two["id"] in str(told)
    assert one["id"] in (await rig.post("/v1/keys/revoke", id=one["id"]))["text"]
    said = (await rig.post("/v1/keys/revoke", id="ann"))["text"]
    assert two["id"] in said and "ann" in said, "the other one is the only one of that name by now"
    assert "revoked" in (await rig.post("/v1/keys/revoke", id="ann"))["text"], "both are"
    rig.server.controller.truth.keys[brief["id"]] = evolve(rig.server.controller.truth.keys[brief["id"]], expires=1.0)
    states = {key["id"]: key["state"] for key in (await rig.get("/v1/keys"))["keys"]}
    assert states == {one["id"]: "revoked", two["id"]: "revoked", brief["id"]: "expired"}
    await rig.post("/v1/keys/revoke", id="brief")
    assert {key["state"] for key in (await rig.get("/v1/keys"))["keys"]} == {"revoked"}, "an expired key can be revoked, too"
