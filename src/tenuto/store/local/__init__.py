"""A store in a directory of a local or shared file system."""
