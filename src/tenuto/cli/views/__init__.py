"""Tables, trees and files that commands make from a repository."""
