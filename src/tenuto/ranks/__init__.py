"""How the processes of a job agree: sessions, rounds, votes and heartbeats over a key-value store."""
