"""The report of a repository: what a person who looks after training wants to see, as data and as one HTML page."""
