"""Sub-layers of a traced layer and the roles of their Linears, by dataflow alone.

A layer carries a residual stream. A sub-layer is a sum `res + h`: `res` is the stream, and `h` is
computed from it, with weights or by mixing tokens. A sub-layer with an attention is `attn` (`cross`
where its keys do not come from the stream), one that mixes tokens in another way is `mixer`, any
other is `ffn`. If the code of its module could not be traced, it is `untraced`. Parallel blocks
read one stream and are summed before they are added to it. They are two sub-layers.
"""

import itertools
from collections.abc import Collection

from torch import fx

from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import is_tensor, nodes_in, output_of, shape
from peftc.dataflow.operations import SCALE, Op, dim_of
from peftc.dataflow.sums import SUMS, differences, is_residual_sum, operands_of_sum
from peftc.dataflow.values import reaches, upstream, value_operands, without_gates
from peftc.recognition.attention.common_linears import of_other_stream
from peftc.recognition.attention.linear_attention import all_attentions
from peftc.recognition.attention.patterns import Attention, has_softmax_mixture
from peftc.recognition.attention.projections import reads_projections
from peftc.recognition.attention.side_by_side import feed_forward_beside
from peftc.recognition.ffn import convolutions
from peftc.recognition.norms import NormFinder, is_of_scores, is_only_in
from peftc.recognition.residual_stream import (
    Stream,
    has_several_streams,
    other_streams,
    stream_input,
    sublayer_output,
)
from peftc.recognition.sublayer import SubLayer, relabel_as_ffn, relabel_local_mixer, set_attention_roles, set_ffn_roles
from peftc.recognition.token_mixing import (
    alike_summands,
    applies_matrix,
    calls_kernel,
    carries_stream,
    is_weighted,
    mixes,
    mixes_neighbours,
    mixes_numbers,
    mixes_tokens,
    pools,
    without_earlier_states,
)


def sub_layers(
    layer: LayerGraph, opaque: Collection[str] = (), first: fx.Node | None = None, ends: Collection[fx.Node] = ()
) -> list[SubLayer]:
    """The sub-layers in the order of the residual stream. `opaque`: modules not traced. `first`:
    the stream, if it is not the input of the layer. `ends`: sums of other layers in its graph.
    """
    if (first := first or stream_input(layer.graph)) is None:
        return []
    finder, subs = _main_stream(Stream(first, layer, opaque, ends=ends))
    sides = _side_streams(finder, first) if subs else []
    subs += [] if sides else finder.left_to_next_layer()
    if sides:  # again, and what another stream has added belongs to no body
        finder, subs = _main_stream(Stream(first, layer, opaque, sides, ends), finder.attentions)
    if not any(sub.kind == "ffn" for sub in subs):
        for sub, behind in itertools.zip_longest(subs[1:], subs[2:]):
            if sub.kind == "mixer" and (behind is None or behind.kind == "attn"):
                relabel_local_mixer(sub, finder.stream)
    for sub in subs if finder.attentions else ():
        if sub.kind == "mixer" and convolutions(sub.h, sub.body, finder.stream):
            relabel_as_ffn(sub, finder.stream)
    apart: list[Stream] = []  # streams with sub-layers of their own
    for side in sides:
        others = [finder.stream, *(other for other in sides if other is not side)]
        more = _Finder(layer, Stream(side.values[0], layer, opaque, others, ends), finder.attentions).along_stream()
        own, is_apart = of_other_stream(more, subs, layer)
        subs += own
        apart += [side] if is_apart else []
    norms, sums = set[fx.Node](), {first, *(sub.add for sub in subs), *(side.values[0] for side in sides)}
    for sub in subs:
        own = NormFinder(finder.stream, apart, sums)
        sub.norms = [n for n in own.before(sub.body, sub.res) if n not in norms and not is_of_scores(n, sub.attentions)]
        end = None if sub.is_added_again else own.behind(sub.add)
        sub.output_norm = None if end and any(is_only_in(end, s.body, s.res, s.h, layer) for s in subs) else end
        sub.norms += [] if sub.output_norm is None else [sub.output_norm]
        norms.update(sub.norms)
    return subs


def _main_stream(stream: Stream, known: list[Attention] | None = None) -> tuple["_Finder", list[SubLayer]]:
    """The stream of a layer's input, of another argument or of what replaces it; its sub-layers."""
    # With another argument: no transformers model, but layers that take values, keys and queries
    finder = _Finder(stream.layer, stream, known)
    if subs := finder.along_stream():
        return finder, subs
    results = [n for n in nodes_in(output_of(stream.layer.graph).args) if is_tensor(n)]
    starts = map(stream.starting_at, other_streams(stream.layer.graph, stream.values[0]))
    pairs = ((other, other.along_stream()) for other in (_Finder(s.layer, s, finder.attentions) for s in starts))
    is_one = len(results) == 1  # Reformer's layers have two streams, and a backward of their own
    along = next((pair for pair in pairs if is_one and pair[1] and pair[0].stream.holds(results[0])), None)
    return along or finder.stream_replacement(stream.values[0]) or (finder, [])


class _Finder:
    """Follows a residual stream through a layer; `stream.values` grows by each sum on it."""

    def __init__(self, layer: LayerGraph, stream: Stream, known: list[Attention] | None = None) -> None:
        self.layer, self.stream = layer, stream
        self.attentions = all_attentions(layer) if known is None else known
        self.sums = [n for n in layer.graph.nodes if layer.op(n) in SUMS and is_tensor(n)]
        self.differences = differences(layer, self.sums)
        self.earlier = set[fx.Node]()  # Linears with a role in a sub-layer so far
        self.outputs = dict[fx.Node, SubLayer]()  # what was added so far
        self.again = set[fx.Node]()  # sums of the stream and what was added before

    def along_stream(self) -> list[SubLayer]:
        subs: list[SubLayer] = []
        for add in sorted([*self.sums, *self.differences]):
            added = self.added_by(add) or (self.added_to_replacement(add) if subs and add in self.sums else [])
            self.earlier.update(p.node for sub in added for p in sub.projections.values())
            subs += [inner for sub in added for inner in self.bottleneck_sublayers(sub) or [sub]]
            self.outputs |= {self.layer.stripped(sub.h): sub for sub in added}
            if added or add in self.again or (add in self.sums and self.continues_stream(add)):
                self.stream.extend(add)
        return subs

    def added_to_replacement(self, add: fx.Node) -> list[SubLayer]:
        """The sub-layers that a sum adds to what convolutions compute of the stream, in its place:
        no later sum is one with the stream before them, and they end in none of another stream.
        """
        # Seen in: no transformers model, but TinyViT
        later = (operand for node in self.sums if node >= add for operand in operands_of_sum(node))
        if any(map(self.stream.holds, later)):
            return []
        for start, other in itertools.permutations(operands_of_sum(add), 2):
            if not is_tensor(start) or shape(start) != shape(other) or not reaches(start, other):
                continue
            body = self.stream.body(start)
            is_local = mixes(body, self.stream) and mixes_neighbours(body, self.stream) and self.is_computed(start)
            is_local = is_local and not is_residual_sum(start)
            if is_local and not any(map(self.stream.holds, upstream(other, lambda n, start=start: n is start))):
                self.stream.extend(start)
                return self.added_by(add)
        return []

    def stream_replacement(self, first: fx.Node) -> tuple["_Finder", list[SubLayer]] | None:
        """The stream that replaces that of the layer's input, and its sub-layers. It begins with
        what the first attention is added to; else with an attention's result, to which a sum adds
        what depends on it.
        """
        # Seen in: Hiera, Inkling 2; the strided blocks of MaxViT
        for add in self.sums:
            operands = [a for a in operands_of_sum(add) if shape(a) == shape(add)]
            for start, other in itertools.permutations(operands, 2):
                computes = self.is_computed(start) or self.stream.is_changed_by_leaf(start)
                if self._attends(other) and not self._attends(start) and computes:
                    is_new = reaches(start, other)
                    if reads_projections(start, self.attentions, self.layer):
                        continue
                    finder = _Finder(self.layer, self.stream.starting_at(start if is_new else first), self.attentions)
                    finder.stream.extend(*[] if is_new else [start])
                    return finder, finder.along_stream()
        pairs = (pair for add in reversed(self.sums) for pair in itertools.permutations(operands_of_sum(add), 2))
        ends = [start for start, other in pairs if is_tensor(start) and self._attends(start) and reaches(start, other)]
        ends = list(map(self.layer.without_norms, ends))
        results = (h for h in ends if not self._is_residual(h))
        if (h := min(results, key=self._attends, default=None)) is None:
            return self._of_other_argument(ends)
        sub = self.sub_layer(h, first, h)
        if carries_stream(h, [n for a in self.attentions for n in (a.call, a.out)], self.stream):
            sub.kind = "untraced"
        self.stream.extend(h)
        return self, [sub, *self.along_stream()]

    def _of_other_argument(self, sums: list[fx.Node]) -> tuple["_Finder", list[SubLayer]] | None:
        """The stream of the argument to which a layer adds its attention, and its sub-layers."""
        # Seen in: no transformers model, but CaiT, whose class token is the second argument
        starts = [a for add in sums for a in operands_of_sum(add) if a.op == "placeholder" and is_tensor(a)]
        finder = _Finder(self.layer, self.stream.starting_at(starts[0]), self.attentions) if starts else None
        return finder and (finder, finder.along_stream())

    def _is_residual(self, node: fx.Node) -> bool:
        """Whether a sum adds an attention to what it does not compute."""
        rest = [n for n in operands_of_sum(node) if not self._attends(n)] if self.layer.op(node) is Op.ADD else []
        return any(not reads_projections(n, self.attentions, self.layer) for n in rest)

    def _attends(self, node: fx.Node) -> int:
        """The number of attentions that a value is computed with, from the stream."""
        body = self.stream.body(node)
        return sum(a.call in body for a in self.attentions)

    def added_by(self, add: fx.Node) -> list[SubLayer]:
        """The sub-layers that a sum adds to the stream: none, one, or two (parallel or serial)."""
        for res, h in self.stream.terms(add):
            self.join_stream(res, h)
            if not self.stream.holds(res) or self.stream.holds(h) or self.mixes_streams(h) or not self.is_computed(h):
                continue
            if self.stream.is_own_step(h):
                self.again.add(add)
                return []
            h = self.stream.end_of_step(self.stream.without_other_tokens(sublayer_output(h)))
            parts = self.parallel_parts(h)
            if known := [part for part in parts or [h] if self.layer.stripped(part) in self.outputs]:
                # Seen in: no transformers model, but Jukebox (`x + a` for a norm and as result)
                self.again.add(add)
                for part in known:
                    self.outputs[self.layer.stripped(part)].is_added_again = True
                return [self.sub_layer(add, res, part) for part in parts if part not in known]
            if not parts and (out := self.serial_attention_output(h)) is not None:
                first = self.sub_layer(add, res, out)
                self.stream.extend(out)
                self.earlier.update(p.node for p in first.projections.values())
                return [first, self.sub_layer(add, res, self.layer.first_of_final_linears(h))]
            subs = [self.sub_layer(add, res, part) for part in parts or [h]]
            return [one for sub in subs for one in self.with_feed_forward_beside(sub)]
        return []

    def with_feed_forward_beside(self, sub: SubLayer) -> list[SubLayer]:
        """And the network whose hidden features join its attention's result. Both have one `h`."""
        out = sub.projections.get("o")
        if out is None or (beside := feed_forward_beside(out.node, sub.attentions, self.layer)) is None:
            return [sub]
        (hidden, inputs), x = beside, self.layer.input_of(next(iter(beside[1].values())).node)
        ffn = SubLayer("ffn", "", sub.h, sub.res, sub.add, self.stream.body(hidden), x, projections=inputs)
        del sub.projections["o"]
        sub.body = (sub.body - ffn.body).union(*(self.stream.body(a.out) for a in sub.attentions))
        sub.set_linears(self.layer)
        ffn.set_linears(self.layer)
        return [sub, ffn]

    def join_stream(self, res: fx.Node, h: fx.Node) -> None:
        """Extends the stream by an operand of a sum: the stream in another layout, times a gate, or
        joined with other tokens or parts to which the sum adds, too.
        """
        # Seen in: no transformers model, but the single streams of Flux, and TimeSformer
        goes_on = self.stream.moves(res) or self.stream.is_share(res, h)
        if goes_on and not self.stream.holds(h) and self.is_computed(h):
            self.stream.extend(res)
            return
        start = self.layer.stripped(res)
        is_join = self.layer.op(start) is Op.JOIN and not self.stream.holds(res)
        same = [n for n in value_operands(start) if shape(n)[-1:] == shape(start)[-1:]] if is_join else []
        parts = value_operands(end) if self.layer.op(end := self.layer.stripped(h)) is Op.JOIN else []
        by_part = list(map(shape, parts)) == list(map(shape, same)) and all(map(self.stream.holds, same))
        if any(map(self.stream.holds, same)) and (reaches(start, h) or by_part):
            self.stream.extend(start)

    def bottleneck_sublayers(self, sub: SubLayer) -> list[SubLayer]:
        """The sub-layers of a stream inside of `sub` (a bottleneck); none if there are fewer than
        two. The inner stream begins with what the attention is first added to, and may end in a
        network.
        """
        # Seen in: MobileBERT. Without it, its sub-layers would have no sites
        if sub.attention is None:
            return []
        call, sums = sub.attention.call, [n for n in self.sums if n in sub.body]
        subs: list[SubLayer] = []
        for add in sums:
            operands = [a for a in operands_of_sum(add) if shape(a) == shape(add)]
            start = [a for a in operands if not reaches(call, a)]
            if len(operands) == 2 and len(start) == 1:
                stream = Stream(start[0], self.layer, self.stream.opaque, ends=self.stream.ends)
                stream.extend(*self.stream.values)
                inner = _Finder(self.layer, stream, self.attentions)
                for node in (n for n in sums if n >= add):
                    if added := inner.added_by(node):
                        subs += added
                        stream.extend(node)
                subs += inner.network_behind(subs, sub) if len(subs) == 1 else []
                break
        return subs if len(subs) > 1 else []

    def network_behind(self, subs: list[SubLayer], sub: SubLayer) -> list[SubLayer]:
        """The feed-forward network whose result is that of a bottleneck with one inner sum."""
        # Seen in: no transformers model, but EdgeNeXt
        inner, behind = subs[0].add, set(upstream(sub.h, lambda n: n is subs[0].add))
        if any(n in behind for n in self.stream.values if n is not inner):  # it goes around the sum
            return []
        network = self.sub_layer(sub.add, sub.res, sub.h)
        return [network] if network.kind == "ffn" and {"up", "down"} <= network.projections.keys() else []

    def left_to_next_layer(self) -> list[SubLayer]:
        """The sub-layer whose result a layer returns beside the stream: the next one adds it."""
        # Seen in: no transformers model, but blocks of flash-attention and vLLM
        results, stream = nodes_in(output_of(self.layer.graph).args), self.stream.values[-1]
        others = [n for n in results if shape(n) == shape(stream) and not self.stream.holds(n)]
        others = [n for n in others if not any(self.layer.stripped(n) in sub.body for sub in self.outputs.values())]
        if len(self.stream.values) < 2 or stream not in results or len(others) != 1 or not self.is_computed(others[0]):
            return []
        sub = self.sub_layer(others[0], stream, others[0])
        sub.is_added_again = True  # no sum of the layer has it
        return [sub] if sub.kind != "untraced" and {"down", "o"} & sub.projections.keys() else []

    def continues_stream(self, add: fx.Node) -> bool:
        """Whether a sum is the stream plus itself, a mixture of copies, or what needs no stream."""
        # Seen in: Gemma 3n, MRA
        operands = operands_of_sum(add)
        others = [a for a in operands if not self.stream.holds(a)]
        carried = (self.mixes_streams(o) or not any(map(self.stream.holds, self.stream.body(o))) for o in others)
        return len(operands) == 2 > len(others) and all(carried)

    def mixes_streams(self, h: fx.Node) -> bool:
        """Whether a value mixes several streams: only its coefficients depend on weights."""
        # Seen in: Gemma 3n
        if not has_several_streams(h) or self.stream.holds(h) or pools(self.stream.body(h), self.stream):
            return False
        behind = upstream(h, lambda n: self.stream.holds(n) or applies_matrix(n, self.layer))
        return any(shape(n)[-1:] == shape(h)[-1:] for n in filter(self.stream.holds, behind))

    def is_computed(self, h: fx.Node) -> bool:
        """Whether a value is computed from the stream, with weights or by mixing tokens."""
        body = self.stream.body(h)
        weighted = any(is_weighted(n, self.layer) for n in body if not self.layer.is_norm(n))
        mixing = mixes(body, self.stream) and not mixes_neighbours(body, self.stream)
        return any(map(self.stream.holds, body)) and (weighted or mixing or pools(body, self.stream))

    def parallel_parts(self, h: fx.Node) -> list[fx.Node]:
        """The two summands of `h`, if exactly one of them contains an attention; or those that the
        modules of one list compute.
        """
        # Seen in: CodeGen, Falcon, GPT-NeoX, GPT-J, Phi
        total = self.layer.stripped(h)
        while self.layer.op(total) in SCALE and len(total.all_input_nodes) == 1:
            total = self.layer.stripped(total.all_input_nodes[0])
        operands = operands_of_sum(total) if self.layer.op(total) is Op.ADD else []
        if len(operands) == 2 and all(map(self.is_computed, operands)):
            attends = [self._attends(o) > 0 for o in operands]
            if attends[0] != attends[1]:
                return operands
        return branches if all(map(self.is_computed, branches := alike_summands(total, self.stream))) else []

    def serial_attention_output(self, h: fx.Node) -> fx.Node | None:
        """The result of an attention, or of convolutions, if `h` is an ffn of that result alone, or
        of it with the features of the stream beside it.
        """
        # Seen in: ConvNeXt, Zamba, Zamba 2; with the stream beside it LoFTR; not in LocalViT
        body = self.stream.body(h)
        out = next((self.layer.consumer_linear(a.out, body) for a in self.attentions if a.call in body), None)
        if out is None and mixes_neighbours(body, self.stream):
            mixing = (n for n in body if not self.stream.holds(n) and mixes_tokens(n, self.layer))
            out = max(mixing, default=None)
            out = next((n for n in body if out is not None and self._joins_parts(n, out)), out)
        joins = {n for n in body if out is not None and self._joins_features(n, out)}
        behind = body.intersection(upstream(h, lambda n: n is out or n in joins)) - {out}
        if out is None or any(map(self.stream.holds, behind)):
            return None
        is_attention = any(out in (a.out, self.layer.consumer_linear(a.out, body)) for a in self.attentions)
        inner = (n for n in self.layer.linears(self.stream.body(out)) if not self.stream.holds(n))
        is_alone = is_attention or all(mixes_tokens(n, self.layer) for n in inner)
        linears = [n for n in self.layer.linears(set(without_gates(h, out))) if reaches(out, n)]
        return out if is_alone and len(linears) > 1 else None

    def _joins_features(self, node: fx.Node, out: fx.Node) -> bool:
        """Whether a value is features of the stream and those computed from `out`, side by side."""
        if self.layer.op(node) is not Op.JOIN or dim_of(node, 0) not in (-1, len(shape(node)) - 1):
            return False
        beside = [part for part in value_operands(node) if not self.stream.holds(part)]
        return 0 < len(beside) < len(value_operands(node)) and all(reaches(out, part) for part in beside)

    def _joins_parts(self, node: fx.Node, out: fx.Node) -> bool:
        """Whether a value joins `out` with other parts of the stream's features to as many as the
        stream has: convolutions of some of the features.
        """
        # Seen in: no transformers model, but FasterNet and InceptionNeXt
        source = next(filter(self.stream.holds, sorted(self.stream.body(node))), None)
        is_join = self.layer.op(node) is Op.JOIN and out in value_operands(node)
        return is_join and source is not None and shape(source) == shape(node) != shape(out)

    def sub_layer(self, add: fx.Node, res: fx.Node, h: fx.Node) -> SubLayer:
        """The sub-layer that computes `h`, its kind and the roles in it."""
        body = self.stream.body(h)
        own = [a for a in self.attentions if a.call in body]
        body = body if own else without_earlier_states(body, res, self.stream)
        sub = SubLayer("ffn", "", h, res, add, body, x=self.stream.entry(body), attentions=own)
        if own:
            set_attention_roles(sub, self.stream, self.earlier)
        elif any(map(self.stream.hides, body)):
            sub.kind = "untraced"
        elif mixes(body, self.stream) or mixes_numbers(body, self.stream):
            sub.kind = "untraced" if has_softmax_mixture(body, self.layer) else "mixer"
        elif calls_kernel(body):
            sub.kind = "untraced"
        else:
            set_ffn_roles(sub, self.stream)
        sub.set_linears(self.layer, *self.earlier)
        return sub


def _side_streams(main: _Finder, first: fx.Node) -> list[Stream]:
    """The other streams of a layer, such as that of a text beside an image's: arguments that the
    layer returns with what it has added to them. `first`: the layer's first hidden state.
    """
    # Seen in: Pegasus-X; Flux and Stable Diffusion 3
    layer, streams = main.layer, list[Stream]()
    results = [n for n in nodes_in(output_of(layer.graph).args) if not main.stream.holds(n)]
    starts = other_streams(layer.graph, first) if results else ()
    for start in (n for n in starts if not main.stream.holds(n)):
        stream = Stream(start, layer, main.stream.opaque, [main.stream], main.stream.ends)
        finder = _Finder(layer, stream, main.attentions)
        if finder.along_stream() and any(finder.stream.holds(node) for node in results):
            streams.append(finder.stream)
    return streams
