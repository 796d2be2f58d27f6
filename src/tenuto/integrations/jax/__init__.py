"""JAX: arrays, sharded ones too, random keys, pytrees and Flax's NNX objects as leaves. Loaded when JAX is used."""
