"""What a request gets: text, tokens and counters, whole or as a stream."""
