"""Foresees faults of a training by what detectors read: rules and small learnt models, how good they were, and what an
alarm is worth."""
