"""The host's side of an engine: schedule, send, collect."""
