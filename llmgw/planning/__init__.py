"""Decisions: placement and its explanation, reconcile, node lifecycle. Values in, values out; now is an argument."""
