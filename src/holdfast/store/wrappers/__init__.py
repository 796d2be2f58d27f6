"""Stores around a store: each adds one behaviour and keeps the contract."""
