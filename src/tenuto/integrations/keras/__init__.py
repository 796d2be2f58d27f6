"""Keras 3: a callback that saves and resumes `fit`, on every backend."""
