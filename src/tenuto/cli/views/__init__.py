"""What commands show: tables, trees and files made from what is in a repository."""
