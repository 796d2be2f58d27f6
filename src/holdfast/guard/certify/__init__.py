"""`holdfast certify`: whether a resume of one's own training script is exact, found out by trying."""
