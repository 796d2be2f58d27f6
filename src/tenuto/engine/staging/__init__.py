"""Host memory that states are staged in: its layout is the file that is written."""
