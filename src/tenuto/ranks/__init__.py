"""Agreement between the processes of a job: sessions, rounds, votes and heartbeats over a key-value store."""
