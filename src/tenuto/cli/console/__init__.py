"""What all commands share: options, exit statuses, tables, errors, and questions to the user."""
