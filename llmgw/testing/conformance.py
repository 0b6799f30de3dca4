"""What every engine adapter must do, as a check that its author calls: C{check(adapter)} in one test of the add-on.

It looks at the promises that a whole fleet stands on (the key stays out of argv, the port is the one given, nothing is slow
or raises) and collects every breach before it complains. What an engine's own options mean stays its author's to test.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import evolve
from zope.interface.exceptions import Invalid
from zope.interface.verify import verifyObject

from llmgw.engines.launch import http_url
from llmgw.errors import Problem
from llmgw.fleet.causes import CLEAN, CONFIGURATION, NODE, RETRY, SOURCE, UNKNOWN
from llmgw.fleet.model import Parallel, Profile, Resources
from llmgw.fleet.node import Device, Installation, Inventory, NodeFacts
from llmgw.fleet.shard import DISK_FULL, Allocation, Diagnosis, EngineLoad, ShardExit, WeightFiles
from llmgw.interfaces import Flags, IEngineAdapter, IServedNames, Needs, ShardLaunch

KEY = "conformance-key-5f2c"
# Far above what a look-up takes, far below what reading a file, starting a process or asking the network would.
QUICK = 0.05
_CAUSES = {CLEAN, CONFIGURATION, DISK_FULL, NODE, RETRY, SOURCE, UNKNOWN}
_EXITS = (ShardExit(), ShardExit(code=0), ShardExit(code=1), ShardExit(signal=9, forced=True), ShardExit(signal=11))
_NOISE = ("", "\x00\x1b[31m", "100 %", "x" * 10_000, "{}", "nan nan nan", 'a{b="c"} NaN', "# HELP", "error: ")
_SECRET = re.compile(r"\{secret:([^}]*)\}")


def check(adapter: IEngineAdapter, profile: Profile | None = None) -> None:
    """Hold an adapter to C{IEngineAdapter}.

    @param profile: one that the engine would serve; left out, one with weights, and C{argv} for engines that want it.
    @raise AssertionError: with one line for each promise that it breaks.
    """
    name = str(getattr(adapter, "name", ""))
    served = profile or Profile(name, weights="/models/conformance", argv=("serve", "{host}", "{port}"))
    before = dict(os.environ)
    found = list(_interface(adapter))
    for part in () if found else (_launches, _needs, _complaints, _questions, _output, _diagnoses):
        try:
            found += part(adapter, served)
        except Exception as error:
            found.append(f"{part.__name__[1:]}: raised {type(error).__name__}: {error}")
    if dict(os.environ) != before:
        found.append("the environment of this process was changed")
    if found:
        raise AssertionError("\n".join(f"adapter {name or adapter}: {line}" for line in found))


def _interface(adapter: IEngineAdapter) -> Iterator[str]:
    try:
        verifyObject(IEngineAdapter, adapter)
    except Invalid as error:
        yield " ".join(str(error).split())
        return
    except Exception as error:
        yield f"it cannot be verified: {type(error).__name__}: {error}"
        return
    if not isinstance(adapter.name, str) or not adapter.name:
        yield "name must be text"
    if not _texts(adapter.default_command):
        yield "default_command must be a tuple of text"


def _texts(words: object) -> bool:
    return isinstance(words, list | tuple) and all(isinstance(word, str) and "\0" not in word for word in words)


def _installation(adapter: IEngineAdapter) -> Installation:
    return Installation(adapter.name, adapter.name, tuple(adapter.default_command))


def _launches(adapter: IEngineAdapter, profile: Profile) -> Iterator[str]:
    one = Allocation("n1", address="10.1.2.3", ports=(20411, 20412, 20413), devices=("GPU-1",), peers=("10.1.2.3",))
    yield from _launch(adapter, profile, one)
    yield from _launch(adapter, profile, evolve(one, address="fd00::7", devices=(), ports=(20511, 20512, 20513)))
    over = evolve(profile, parallel=Parallel(tensor=2, nodes=2))
    if not adapter.problems(over, None, None, None, Flags()):
        ranks = evolve(one, nodes=2, head="10.1.2.3", head_port=20500, peers=("10.1.2.3", "10.1.2.4"))
        yield from _launch(adapter, over, ranks)
        yield from _launch(adapter, over, evolve(ranks, rank=1, address="10.1.2.4"))


def _launch(adapter: IEngineAdapter, profile: Profile, allocation: Allocation) -> Iterator[str]:
    asked = (profile, allocation, _installation(adapter), None, ("public/name",), KEY)
    launch = adapter.launch(*asked)
    rank = f"launch of rank {allocation.rank}"
    if launch != adapter.launch(*asked):
        yield f"{rank}: the same question had two answers"
    if not launch.argv or not _texts(launch.argv):
        yield f"{rank}: argv must be a tuple of text that is not empty"
        return
    yield from (f"{rank}: {line}" for line in (*_secrecy(launch), *_addresses(launch, allocation)))


def _secrecy(launch: ShardLaunch) -> Iterator[str]:
    if any(KEY in word for word in launch.argv) or KEY in launch.url:
        yield "the key stands in argv or url, where every user of the node can read it"
    if launch.key not in ("", KEY):
        yield "key is not the key that was given"
    handed = [*launch.environment.values(), *(secret.text for secret in launch.secrets)]
    if launch.key and not any(KEY in text for text in handed):
        yield "the key reaches the engine neither by environment nor by a secret file"
    if any(KEY in text for text in launch.defaults.values()):
        yield "the key stands in defaults, which agent.yaml may replace"
    named = {name for word in (*launch.argv, *launch.environment.values()) for name in _SECRET.findall(word)}
    if lost := named - {secret.name for secret in launch.secrets}:
        yield f"secret files are named but not given: {', '.join(sorted(lost))}"


def _addresses(launch: ShardLaunch, allocation: Allocation) -> Iterator[str]:
    port = str(allocation.ports[0])
    if launch.ready is None and launch.models is not None:
        yield "models without ready: a rank that serves no HTTP lists no models"
    if launch.ready is None:
        return
    if launch.url != http_url(allocation.address, allocation.ports[0]):
        yield f"url is {launch.url}, not the address and port that were allocated"
    told = [*launch.argv, *launch.environment.values(), *(secret.text for secret in launch.secrets)]
    for what, value in (("port", port), ("address", allocation.address)):
        if not any(value in word for word in told):
            yield f"the engine is not told the allocated {what}"
    for path in (launch.ready, launch.models, launch.metrics):
        if path and not path.startswith("/"):
            yield f"path {path!r} does not begin with /"


def _needs(adapter: IEngineAdapter, profile: Profile) -> Iterator[str]:
    for count in (None, 0, 3):
        needs = adapter.needs(evolve(profile, resources=Resources(devices=count)), None)
        if not isinstance(needs, Needs):
            yield f"needs: {needs!r} is no Needs"
        elif count is not None and needs.devices != count:
            yield f"needs: {needs.devices} devices where the profile says {count}"
        elif needs.devices < 0 or needs.host_memory < 0 or needs.ports < 1 or (needs.memory or 0) < 0:
            yield f"needs: {needs} has a figure that cannot be"


def _complaints(adapter: IEngineAdapter, profile: Profile) -> Iterator[str]:
    node = NodeFacts("n1", "10.1.2.3", Inventory(cpus=8, memory_total=2**36, devices=(Device("GPU-1", 0, "GPU"),)))
    nowhere = WeightFiles("/models/conformance", found=False, looked=("/models/conformance",))
    odd = evolve(profile, arguments={"no-such-option": [1, {"a": None}], "x": None, "y": False, "z": -1})
    helped = Flags(frozenset({"--some-option"}), frozenset())
    for word in ("problems", "warnings"):
        for case in (
            (profile, None, None, None, Flags()),
            (odd, nowhere, node, _installation(adapter), helped),
            (Profile(adapter.name), None, node, None, Flags()),
        ):
            yield from _asked(word, getattr(adapter, word), case)
    if IServedNames.providedBy(adapter):
        yield from _asked("name_problems", IServedNames(adapter).name_problems, (("public/name", "alias"),))
    if wrong := adapter.problems(profile, None, None, None, Flags()):
        yield f"problems: a plain profile is refused: {'; '.join(map(str, wrong))}"


def _asked(word: str, ask: Any, case: Sequence[Any]) -> Iterator[str]:
    took = []
    for _ in range(3):
        begin = time.perf_counter()
        found = ask(*case)
        took.append(time.perf_counter() - begin)
    if min(took) > QUICK:
        yield f"{word}: took {min(took):.3f} s; it must not wait for anything"
    if not isinstance(found, list) or not all(isinstance(row, Problem) and row.text for row in found):
        yield f"{word}: {found!r} is no list of Problems with texts"


def _questions(adapter: IEngineAdapter, profile: Profile) -> Iterator[str]:
    command = ["/opt/engine", "run"]
    for word, argv in (("version_argv", adapter.version_argv(command)), ("flags_argv", adapter.flags_argv(command))):
        if argv is not None and (not _texts(argv) or list(argv[:2]) != command):
            yield f"{word}: {argv!r} does not begin with the installation's command"
    if adapter.version("") is not None:
        yield "version: nothing printed is no version"
    if adapter.flags("") != Flags():
        yield "flags: nothing printed means no flags"


def _output(adapter: IEngineAdapter, profile: Profile) -> Iterator[str]:
    if adapter.phase("") is not None:
        yield "phase: an empty line says nothing"
    if adapter.load("") != EngineLoad():
        yield "load: what is not there is None, never 0"
    for text in _NOISE:
        phase = adapter.phase(text)
        if phase is not None and not 0 <= (phase.progress or 0) <= 1:
            yield f"phase: progress {phase.progress} is not between 0 and 1"
        if not isinstance(adapter.load(text), EngineLoad):
            yield "load: must answer an EngineLoad"


def _diagnoses(adapter: IEngineAdapter, profile: Profile) -> Iterator[str]:
    for ended in _EXITS:
        for tail in ((), _NOISE):
            told = adapter.diagnose(ended, tail)
            if not isinstance(told, Diagnosis) or not told.text or told.cause not in _CAUSES:
                yield f"diagnose: {told!r} needs a text and one of the causes {', '.join(sorted(_CAUSES))}"
