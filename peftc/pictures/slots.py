"""Values of a layer on their way: edits join them one behind the other."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Slot:
    """A value, and the joints that edits put on it.

    Attributes:
        source: the node that computes it, or the value that it is at first.
        joints: nodes in the order in which the value passes them.
    """

    source: str | Slot
    joints: list[str] = field(default_factory=list[str])

    def before(self, position: int) -> str:
        """The node behind which a reader stands that was there after `position` joints."""
        if position > 0:
            return self.joints[position - 1]
        return self.source if isinstance(self.source, str) else self.source.tip

    @property
    def tip(self) -> str:
        """The node that has the value after all joints."""
        return self.before(len(self.joints))


@dataclass(frozen=True, eq=False)
class Reading:
    """A reader of a value as it is now: joints that come later are behind it."""

    slot: Slot
    position: int

    @classmethod
    def now(cls, slot: Slot) -> Reading:
        return cls(slot, len(slot.joints))

    @property
    def node(self) -> str:
        return self.slot.before(self.position)
