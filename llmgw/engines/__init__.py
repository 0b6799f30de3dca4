"""Engine adapters: profile and allocation to argv, environment, probes and diagnosis. They do no I/O.

This is a plugin package: a distribution of its own adds an adapter by shipping C{llmgw/engines/NAME.py}, ending in a
module-level provider of L{llmgw.interfaces.IEngineAdapter}, without an C{__init__.py} beside it.
"""

from twisted.plugin import pluginPackagePaths

__path__.extend(pluginPackagePaths(__name__))
__all__: list[str] = []
