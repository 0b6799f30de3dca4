"""The agent's side of the link: dials the servers for ever and carries what is said between them and the node.

The uplink decides nothing about engines. It tries every address once per round, lets only a leader that the fence allows
speak to the node, and joins the parts of a desired state. What the node says on a link that has ended goes nowhere: the
next link begins with a registration, which is complete.
"""

from __future__ import annotations

from llmgw.agent.inode import INode

__all__ = ["INode"]
