"""Shared test support for Tenuto and its extensions: shipped suites, recorded and simulated file systems, faults."""
