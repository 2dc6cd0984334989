"""An attention of a form, over the tokens of the call and of a cache."""

from torch import Tensor

from peftc.forms.past_module import causal_attention
from peftc.forms.sequence_module import Sequence, past_of


def attention_with_past(q: Tensor, k: Tensor, v: Tensor, heads: int, sequence: Sequence | None, form: str) -> Tensor:
    """softmax(q kᵀ / √e) v in each of the heads, over the tokens up to each one, in a cache too.

    Shapes: q, k: (batch, tokens, heads · e); v and the result: (batch, tokens, heads · e_v)
    Args:
        form: the name of what keeps its keys and values beside the cache.
    Raises: P423 where the tokens of the cache are unknown.
    """
    past = past_of(sequence, q)
    return causal_attention(q, *past.extended(form, k, v), past, heads)
