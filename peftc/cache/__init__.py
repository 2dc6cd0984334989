"""Site tables of configurations, kept in the user's cache folder. No torch in here."""
