"""The task type of PEFT, from the end of a class's name, as transformers names classes."""

from __future__ import annotations

from collections.abc import Collection

_ENDS = (
    ("ForCausalLM", "CAUSAL_LM"),
    ("LMHeadModel", "CAUSAL_LM"),
    ("ForConditionalGeneration", "SEQ_2_SEQ_LM"),
    ("ForSequenceClassification", "SEQ_CLS"),
    ("ForTokenClassification", "TOKEN_CLS"),
    ("ForQuestionAnswering", "QUESTION_ANS"),
)
# Of these PEFT trains and loads the heads, whatever the configuration says.
_HEADS = {"SEQ_CLS": {"classifier", "score"}, "TOKEN_CLS": {"classifier", "score"}, "QUESTION_ANS": {"qa_outputs"}}


def task_type(cls: type, saved: Collection[str]) -> str | None:
    """None where a class has none, or where PEFT would look for a head that the adapter lacks."""
    task = next((task for end, task in _ENDS if cls.__name__.endswith(end)), None)
    heads = _HEADS.get(task or "")
    return task if heads is None or heads & set(saved) else None
