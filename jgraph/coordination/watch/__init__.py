"""Board of a watched cluster: series, rates and alarms in words, from its answers."""
