"""Certifies a training script: runs it whole, interrupts and resumes it, and compares every step bit for bit."""
