"""Every phase of a job of several ranks, and in each of them a rank, the coordinator or their meeting place struck."""
