"""`tenuto demo`: a real training job, killed again and again, compared bit for bit with one that nobody touched."""
