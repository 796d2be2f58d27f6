"""Campaigns that attack Tenuto: crash states, kills, corruption, faults. Not shipped; run from a checkout."""
