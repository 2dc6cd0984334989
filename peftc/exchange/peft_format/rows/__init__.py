"""The types of PEFT adapters by what they compute, as rows of `PeftType`."""
