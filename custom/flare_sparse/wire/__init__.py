"""Messages: the cheapest way to say a selection, values in one flat buffer, and a receiver that trusts nothing."""
