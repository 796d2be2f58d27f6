"""Worker threads, calls with deadlines, and background priority."""
