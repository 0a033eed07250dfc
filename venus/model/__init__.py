"""Qwen3, and who sees whom."""
