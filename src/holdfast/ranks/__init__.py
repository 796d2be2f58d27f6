"""Agreement between the processes of one job: how they meet, and agree on one matter after another."""
