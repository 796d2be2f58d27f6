"""Plans which rank holds, writes and reads which box of each leaf."""
