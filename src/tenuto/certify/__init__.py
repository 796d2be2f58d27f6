"""Certifies a training script: runs it, interrupts and resumes it, and compares every step bit for bit."""
