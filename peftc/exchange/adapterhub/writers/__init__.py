"""What writes the configurations and tensors of AdapterHub's library, by kinds of adapters."""
