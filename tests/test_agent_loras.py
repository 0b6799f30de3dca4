"""How an agent brings an engine's adapters about: tried again, told, noted for the next agent; a clock, an engine's answers."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock

from llmgw.agent.loras import AGAIN, DEADLINE, Loras
from llmgw.agent.shardfolder import AttemptFolder, Intent
from llmgw.fleet.model import Lora
from llmgw.fleet.shard import ShardLora, WeightFiles
from llmgw.interfaces import LoraDoor
from tests.agent_rig import order

TUNED, OTHER, BIG = (Lora(name, f"loras/{name}") for name in ("tuned", "other", "big"))
DOOR = LoraDoor("/load", "/unload", "", rank=16, most=2, highest=512, served="m:{name}")


class Engine:
    """What it has been asked, and what it answers.

    @ivar refusals: by adapter, what it says instead of loading it; C{slow}: what it takes its time for.
    """

    def __init__(self) -> None:
        self.names: list[str] | None = ["m"]
        self.asked: list[str] = []
        self.refusals: dict[str, str] = {}
        self.slow: dict[str, Deferred[str]] = {}

    async def listed(self, intent):
        return None if self.names is None else list(self.names)

    async def post(self, url, key, deadline, said):
        what, name = url.rpartition("/")[2], json.loads(said)["lora_name"]
        self.asked.append(f"{what} {name}")
        if what in self.slow:
            await self.slow[what]
        if problem := self.refusals.get(name):
            return problem
        self.names = [one for one in self.names if one != name] + ([name] if what == "load" else [])
        return ""


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


class Rig:
    """One engine whose adapters are followed; C{news} counts what was told."""

    def __init__(self, path):
        self.clock, self.engine, self.news = Clock(), Engine(), 0
        self.folder = AttemptFolder(path / "1", "m/1/0", 1)
        self.folder.create()
        self.found = {}
        self.intent = Intent(order(()), "vllm", "vllm", url="http://e", loras=DOOR)
        self.loras = self.adopt()

    def adopt(self):
        self.loras = Loras(self.clock, self.engine, self, self.look)
        return self.loras

    def changed(self):
        self.news += 1

    def look(self, weights):
        there = WeightFiles(weights, True, f"/models/{weights}", config={"peft_type": "LORA", "r": 64 if "big" in weights else 8})
        return succeed(self.found.get(weights, there))

    def want(self, *loras, fresh=False):
        profile = evolve(self.intent.order.profile, loras=loras)
        self.intent = evolve(self.intent, order=evolve(self.intent.order, profile=profile))
        return self.follow(fresh)

    def follow(self, fresh=False):
        return Deferred.fromCoroutine(self.loras.follow(fresh))

    def has(self):
        return {one.name: one.problem for one in self.loras.has}


def test_it_loads_and_unloads_what_the_order_says_and_no_more(rig):
    rig.want(TUNED)
    assert rig.loras.has == (ShardLora("tuned", "loras/tuned", "m:tuned"),) and rig.news == 1
    rig.follow()
    rig.clock.advance(10 * AGAIN)
    rig.follow()
    rig.want(OTHER)
    rig.want(evolve(OTHER, weights="loras/newer"))
    assert rig.engine.asked == ["load tuned", "load other", "unload tuned", "unload other", "load other"]
    assert rig.loras.has == (ShardLora("other", "loras/newer", "m:other"),)


def test_what_fails_is_told_and_tried_again(rig):
    """Not at every look; its neighbours are loaded meanwhile, and it is forgotten with its order."""
    rig.engine.refusals["tuned"] = "it answers 500: it is garbled"
    rig.found["loras/other"] = WeightFiles("loras/other", False, looked=("/models/loras/other",))
    third = Lora("third", "loras/third")
    rig.want(TUNED, OTHER, evolve(third, name="a"))
    assert "does not load /models/loras/tuned: it answers 500: it is garbled" in rig.has()["tuned"]
    assert "loras/other is not on the node (looked at /models/loras/other)" in rig.has()["other"]
    news = rig.news
    rig.clock.advance(AGAIN - 1)
    rig.follow()
    assert rig.engine.asked == ["load tuned"], "the third is one too many"
    rig.clock.advance(1)
    rig.follow()
    assert rig.engine.asked == ["load tuned"] * 2 and rig.news == news, "what is as before is no news"
    rig.engine.refusals.clear()
    rig.found.clear()
    rig.clock.advance(AGAIN)
    rig.follow()
    assert rig.has() == {"tuned": "", "other": "", "a": "adapter a is one too many: its engine was started for 2"}
    rig.want(TUNED, OTHER)
    assert rig.has() == {"tuned": "", "other": ""}


def test_only_what_came_later_can_be_a_reason_for_another_start(rig):
    """An engine that was started for an adapter and does not take it would not take it then, either."""
    rig.want(BIG, fresh=True)
    assert [one.anew for one in rig.loras.has] == [False]
    rig.clock.advance(AGAIN)
    rig.follow()
    assert [one.anew for one in rig.loras.has] == [False]
    rig.want(BIG, evolve(BIG, name="bigger"))
    assert [one.anew for one in rig.loras.has] == [False, True]


def test_the_next_agent_knows_what_the_engine_was_given(rig):
    """Loaded is what the engine lists, by which weights what was noted; an unknown one is unloaded first."""
    rig.want(TUNED, OTHER)
    rig.adopt()
    assert rig.has() == {"tuned": "", "other": ""}, "before anybody is asked"
    rig.engine.asked.clear()
    rig.follow()
    assert rig.engine.asked == []
    rig.engine.names.remove("other")
    (rig.folder.path / "loras.json").unlink()
    rig.adopt()
    assert rig.has() == {}
    rig.follow()
    assert rig.engine.asked == ["unload tuned", "load tuned", "load other"] and rig.has() == {"tuned": "", "other": ""}


def test_an_engine_that_hangs_is_asked_no_further(rig):
    """One attempt at a time; the rest waits for the next. An order that comes meanwhile is followed at once afterwards."""
    rig.engine.slow["load"] = Deferred()
    done = rig.want(TUNED, OTHER)
    assert rig.want(TUNED).called and not done.called and rig.engine.asked == ["load tuned"]
    rig.want(TUNED, OTHER)
    rig.clock.advance(DEADLINE + 1)
    rig.engine.refusals["tuned"] = "no answer in 60 s"
    rig.engine.slow.pop("load").callback("")
    assert done.called and rig.engine.asked == ["load tuned"] and list(rig.has()) == ["tuned"]
    rig.engine.refusals.clear()
    rig.clock.advance(AGAIN)
    rig.follow()
    assert rig.has() == {"tuned": "", "other": ""}


def test_one_that_does_not_answer_keeps_what_it_had(rig):
    rig.want(TUNED)
    rig.engine.names = None
    rig.want(OTHER)
    assert rig.has() == {"tuned": ""}
    rig.engine.names = ["m", "tuned"]
    rig.engine.refusals["tuned"] = "it answers 500"
    rig.clock.advance(AGAIN)
    rig.follow()
    assert rig.has() == {"tuned": "", "other": ""}, "what is not unloaded is there"


def test_an_engine_that_takes_none_later_has_those_of_its_start(rig):
    rig.intent = evolve(rig.intent, loras=LoraDoor())
    rig.want(TUNED)
    assert rig.loras.has == (ShardLora("tuned", "loras/tuned", "tuned"),) and rig.engine.asked == []


def test_what_comes_does_not_wait_for_what_leaves(rig):
    """An engine may answer only when nothing runs any more with the adapter that it is to unload."""
    rig.want(TUNED)
    rig.engine.slow["unload"] = Deferred()
    done = rig.want(OTHER)
    assert not done.called and rig.has() == {"tuned": "", "other": ""} and rig.news == 2
    rig.engine.slow["unload"].callback("")
    assert done.called and rig.has() == {"other": ""}


def test_what_is_under_way_when_the_agent_ends_is_not_done(rig):
    """Nothing is told or noted, and no other adapter is begun with; the next agent finds out."""
    rig.engine.slow["load"] = Deferred()
    rig.want(TUNED, OTHER)
    rig.loras.ended = True
    rig.engine.slow["load"].callback("no answer in 60 s")
    assert rig.engine.asked == ["load tuned"] and rig.news == 0 and rig.has() == {}
