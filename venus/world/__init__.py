"""Synthetic webs, their questions and experts."""
