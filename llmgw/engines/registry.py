"""Which engine adapters there are: every module-level provider of C{IEngineAdapter} in C{llmgw.engines}, by its name.

An adapter that does not keep the interface's promises is named in the log and left out, so that one bad add-on never
takes the other engines with it. What cannot even be imported is logged by C{twisted.plugin} itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from twisted.logger import Logger
from twisted.plugin import getPlugins
from zope.interface.exceptions import Invalid
from zope.interface.verify import verifyObject

import llmgw.engines
from llmgw.interfaces import IEngineAdapter

log = Logger()


def adapters(candidates: Iterable[IEngineAdapter] | None = None) -> dict[str, IEngineAdapter]:
    """All usable adapters by name, sorted; of two with one name the first found stays and the log says so.

    @param candidates: what to choose from; left out, what C{twisted.plugin} finds.
    """
    found: dict[str, IEngineAdapter] = {}
    for adapter in getPlugins(IEngineAdapter, llmgw.engines) if candidates is None else candidates:
        fault = _fault(adapter)
        if fault is None and adapter.name in found:
            fault = f"its name {adapter.name!r} is taken by {type(found[adapter.name]).__module__}"
        if fault is None:
            found[adapter.name] = adapter
        else:
            log.error("engine adapter {adapter} is left out: {fault}", adapter=type(adapter).__module__, fault=fault)
    return dict(sorted(found.items()))


def _fault(adapter: IEngineAdapter) -> str | None:
    try:
        verifyObject(IEngineAdapter, adapter)
    except Invalid as error:
        return " ".join(str(error).split())
    except Exception as error:  # zope.interface stumbles over some signatures, e.g. a method without self.
        return f"it cannot be verified: {type(error).__name__}: {error}"
    return None if isinstance(adapter.name, str) and adapter.name else "it has no name"
