"""The files, names and types of PEFT adapters."""
