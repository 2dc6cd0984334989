"""Input made to break peftc: mutated specs, malicious adapters, and saves that are killed."""
