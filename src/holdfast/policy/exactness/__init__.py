"""Whether a resume is exact: two runs compared step by step, and what a difference says about its cause."""
