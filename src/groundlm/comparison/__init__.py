"""`groundlm compare`: models x seeds at equal tokens and parameters, as a table."""
