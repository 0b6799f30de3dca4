"""Simulated fleets that serve already, for tests on a virtual clock."""

from __future__ import annotations

from llmgw.testing.simulate import Fleet, model


def serving(nodes=None, models=None, **more):
    """A fleet whose models are all ready."""
    fleet = Fleet(nodes or {"a": 2, "b": 2}, **more)
    models = models or [model("m", 2)]
    fleet.lead(models)
    fleet.until(lambda: all(fleet.ready(one.name) == one.replicas.min for one in models), "all models ready")
    return fleet
