"""Text to token ids and back: tokenizer, chat template, detokenizer, prompts, prompt files."""
