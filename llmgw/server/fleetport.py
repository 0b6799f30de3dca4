"""The server's side of the link: holds one session per node and is the only way to command a node.

Whether this server may command is asked at each emission, never remembered. A standby refuses before it has read a byte.
"""

from __future__ import annotations

from llmgw.server.imembers import IMembers, NodeAway, NotActing, Refusal, SessionFacts, Unanswered

__all__ = ["IMembers", "NodeAway", "NotActing", "Refusal", "SessionFacts", "Unanswered"]
