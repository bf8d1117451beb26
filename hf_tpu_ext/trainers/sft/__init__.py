"""Supervised fine-tuning, with a teacher or with few bits."""
