"""Types of PEFT at attentions, whose tensors are of no modules."""
