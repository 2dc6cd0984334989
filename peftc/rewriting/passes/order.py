"""In which order passes and edits of a layer act, and how passes name its states."""

from collections.abc import Iterable, Iterator, Sequence

from peftc.addressing.sites import Site, State
from peftc.planning import ir
from peftc.planning.pass_edit import form_of_pass


def turns_of(site_edits: Sequence[ir.SiteEdit]) -> dict[int, int]:
    """The turn of each edit, by `id`: passes have turns of their own, and edits between two passes
    act together. Empty without passes.
    """
    turns: dict[int, int] = {}
    turn = 0
    has_passes = False
    for one in site_edits:
        is_pass = form_of_pass(one) is not None
        has_passes |= is_pass
        turn += is_pass
        turns[id(one)] = turn
        turn += is_pass
    return turns if has_passes else {}


def named_states(sites: Iterable[Site]) -> Iterator[tuple[Site, str, State]]:
    """The activations of the sites of a layer, with their names: `attn.self.q.h`, `h`."""
    for site in sites:
        prefix = [name if index is None else f"{name}[{index}]" for name, index in site.steps_in_layer]
        for name, state in site.states.items():
            if state.activation is not None and name != "kv":  # a pair: `k` and `v` have names, too
                yield site, ".".join([*prefix, name]), state
