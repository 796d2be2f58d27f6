"""Stores of objects under one contract."""
