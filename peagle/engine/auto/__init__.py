"""`-k auto`: how many tokens a step drafts and verifies, and from which source."""
