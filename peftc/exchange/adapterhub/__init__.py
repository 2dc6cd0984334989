"""The files, names and configurations of AdapterHub's library, `adapters`."""
