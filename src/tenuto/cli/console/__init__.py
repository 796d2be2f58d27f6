"""Shared parts of all commands: options, exit statuses, tables, errors and prompts."""
