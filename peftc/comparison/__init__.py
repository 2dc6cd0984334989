"""What differs between two specs, plans or adapters: their equations, sites, shapes and counts."""
