"""Values that every layer shares: identities, boxes, leaves, records, canonical JSON."""
