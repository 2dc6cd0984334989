"""Input that tries to break peftc: mutated specs, malicious adapters, and killed saves."""
