"""The settings file: its keys, how it is read, and the arguments that it stands for."""
