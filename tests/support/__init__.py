"""What several test files share: small trainings, ranks as threads and as processes, stores that fail on command."""
