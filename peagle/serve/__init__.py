"""HTTP in OpenAI's form over one engine: `peagle serve`. Needs the extra `serve`."""
