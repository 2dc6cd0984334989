"""The norms of a sub-layer: before its Linears, and right behind its sum."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from peftc.dataflow.nodes import is_tensor
from peftc.dataflow.values import upstream, value_users
from peftc.recognition.residual_stream import Stream


@dataclass(frozen=True)
class NormFinder:
    """Finds norms in a layer.

    Attributes:
        main: the stream of the layer.
        sides: its other streams, with sub-layers and norms of their own.
        sums: the values of all streams between sub-layers.
    """

    main: Stream
    sides: Sequence[Stream]
    sums: Collection[fx.Node]

    def before(self, body: Collection[fx.Node], res: fx.Node) -> list[fx.Node]:
        """The norms that a sub-layer computes with; one may be scaled before a Linear reads it.
        `res`: what its sum adds the result to.
        """
        layer = self.main.layer
        stream = next((side for side in self.sides if side.holds(res)), self.main)
        foreign = [side for side in self.sides if side is not stream]

        def ends(node: fx.Node) -> bool:
            return node in self.sums or layer.is_norm(node) or not stream.holds(node)

        scaled = {m for n in body if stream.holds(n) for m in upstream(n, ends) if stream.holds(m)}
        norms = filter(layer.is_norm, sorted(scaled.union(body)))
        return [n for n in norms if not any(side.holds(n) for side in foreign)]

    def behind(self, add: fx.Node) -> fx.Node | None:
        """The norm that alone reads a sum."""
        users = [add]
        while len(users) == 1 and (users[0] is add or self.main.layer.passes_through(users[0]) is not None):
            users = [u for u in value_users(users[0]) if is_tensor(u)]
        return users[0] if len(users) == 1 and self.main.layer.is_norm(users[0]) else None
