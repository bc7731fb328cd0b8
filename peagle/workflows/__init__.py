"""What the commands do, without printing: a run over prompts, a teacher's answers, parity with the references."""
