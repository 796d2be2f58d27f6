"""Leaves and one host buffer: the image.

Its layout is the safetensors file that it will be; arenas hold it; capture fills it.
"""
