"""What `tenuto bench` measures: the speed of saves and restores in one place, beside the raw speed of the disk."""
