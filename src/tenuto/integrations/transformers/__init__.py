"""Hugging Face's Trainer and its subclasses: `tenuto.transformers` is the public face."""
