"""Objects in object stores: S3 and what speaks it, Google Cloud Storage, Azure Blob Storage, and HTTP servers to read
from. All through obstore, which has one API for them."""
