"""Venus: Qwen3, SFT, IGPO, a search agent and its evaluation, each in one short file."""
