"""Preference and reward training."""
